"""Build entry point; the metadata is in pyproject.toml."""

import os
import sys

from setuptools import setup

sys.path.insert(
    0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "custom_ops")
)

from builder import extensions
from commands import BuildNative, WheelForAnyPython

setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildNative, "bdist_wheel": WheelForAnyPython},
)
