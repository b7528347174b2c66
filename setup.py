"""Build entry point; the metadata is in pyproject.toml."""

from setuptools import setup

setup()
