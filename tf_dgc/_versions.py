"""Refuse TensorFlow, Keras and Python versions this release was not tested with.

The supported range is stated once, in `pyproject.toml`; it is read back here from
the metadata that pip installed.
"""

import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def check_supported(installed: dict[str, str]) -> None:
    """Raise `ImportError` if a package is outside the supported range.

    Args:
        installed: version by distribution name, e.g. `{"keras": "3.15.1"}`. The key
            `"python"` stands for the interpreter.
    """
    for name, supported in _supported_ranges().items():
        version = installed.get(name)
        if version is not None and not supported.contains(version, prereleases=True):
            raise ImportError(
                f"tf_dgc {tf_dgc_version()} supports {name} {supported}, "
                f"but {name} {version} is installed. Install a supported version "
                f"(for example: pip install '{name}{supported}') or a release of "
                "tf_dgc made for yours."
            )


def tf_dgc_version() -> str:
    """Return the installed version of this package."""
    return metadata.version("tf_dgc")


def python_version() -> str:
    """Return the interpreter's version as `major.minor.micro`."""
    return ".".join(map(str, sys.version_info[:3]))


def _supported_ranges() -> dict[str, SpecifierSet]:
    ours = metadata.metadata("tf_dgc")
    ranges = {"python": SpecifierSet(ours["Requires-Python"])}
    for line in ours.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            ranges[requirement.name] = requirement.specifier
    return ranges
