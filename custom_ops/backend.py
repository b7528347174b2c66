"""PEP 517 build backend: setuptools, and TensorFlow's headers where needed."""

from builder import build_requirements
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def get_requires_for_build_wheel(config_settings=None):
    """Return what building a wheel needs."""
    ours = build_meta.get_requires_for_build_wheel(config_settings)
    return ours + build_requirements()


def get_requires_for_build_editable(config_settings=None):
    """Return what an editable installation needs."""
    ours = build_meta.get_requires_for_build_editable(config_settings)
    return ours + build_requirements()
