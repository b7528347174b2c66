"""Checks the versions of TensorFlow, Keras and Python, and Keras's backend.

The supported ranges are those of `pyproject.toml`, read from the installed metadata.
"""

import sys
import warnings
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def check_supported(installed: dict[str, str]) -> None:
    """Raise an error for versions below the supported range; warn of newer ones.

    Args:
        installed: versions by distribution name, e.g. `{"keras": "3.15.1"}`, and that
            of the interpreter as `"python"`.

    Raises:
        ImportError: if a package is too old.
    """
    for name, supported in _supported_ranges().items():
        version = installed.get(name)
        if version is None or supported.contains(version, prereleases=True):
            continue
        mismatch = (
            f"tf_dgc {tf_dgc_version()} supports {name} {supported}, "
            f"but {name} {version} is installed."
        )
        if _is_newer(version, supported):
            warnings.warn(
                f"{mismatch} It is untested: private names that tf_dgc uses may have "
                "changed, so training may fail. Install a later release of tf_dgc, or "
                f"{name} in the supported range.",
                RuntimeWarning,
                stacklevel=4,  # `import tf_dgc`
            )
        else:
            raise ImportError(
                f"{mismatch} Install a supported version (for example: pip install "
                f"'{name}{supported}') or a release of tf_dgc made for yours."
            )


def check_backend(name: str | None) -> None:
    """Raise `ImportError` unless Keras's backend is TensorFlow, its default."""
    if name and name != "tensorflow":
        raise ImportError(
            "tf_dgc works with Keras's TensorFlow backend only. Set the environment "
            'variable KERAS_BACKEND=tensorflow before Keras is imported, or "backend": '
            '"tensorflow" in the file `~/.keras/keras.json`, which the variable '
            f"overrides. Received: the backend {name!r}"
        )


def tf_dgc_version() -> str:
    """Return the installed version of this package."""
    return metadata.version("tf_dgc")


def python_version() -> str:
    """Return the interpreter's version as `major.minor.micro`."""
    return ".".join(map(str, sys.version_info[:3]))


def _supported_ranges() -> dict[str, SpecifierSet]:
    package = metadata.metadata("tf_dgc")
    ranges = {"python": SpecifierSet(package["Requires-Python"])}
    for line in package.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            ranges[requirement.name] = requirement.specifier
    return ranges


def _is_newer(version: str, supported: SpecifierSet) -> bool:
    """Whether a version outside of a range is above it."""
    lower = [bound for bound in supported if bound.operator in (">=", ">")]
    return all(bound.contains(version, prereleases=True) for bound in lower)
