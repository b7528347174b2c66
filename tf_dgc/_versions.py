"""Check the versions of TensorFlow, Keras and Python, and Keras's backend.

Older versions are refused, newer ones may go, slowly, and get a warning.

The supported range is stated once, in `pyproject.toml`; it is read back here from
the metadata that pip installed.
"""

import sys
import warnings
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def check_supported(installed: dict[str, str]) -> None:
    """Refuse what is older than the supported range, and warn of what is newer.

    Args:
        installed: version by distribution name, e.g. `{"keras": "3.15.1"}`. The key
            `"python"` stands for the interpreter.

    Raises:
        ImportError: if a package is older.
    """
    for name, supported in _supported_ranges().items():
        version = installed.get(name)
        if version is None or supported.contains(version, prereleases=True):
            continue
        found = (
            f"tf_dgc {tf_dgc_version()} supports {name} {supported}, "
            f"but {name} {version} is installed."
        )
        if _is_newer(version, supported):
            warnings.warn(
                f"{found} It was not tried: what tf_dgc knows of private names may be "
                f"wrong, and end training. A later release of tf_dgc, or {name} of the "
                "supported range, is safe.",
                RuntimeWarning,
                stacklevel=4,  # `import tf_dgc`
            )
        else:
            raise ImportError(
                f"{found} Install a supported version (for example: pip install "
                f"'{name}{supported}') or a release of tf_dgc made for yours."
            )


def check_backend(name: str | None) -> None:
    """Raise `ImportError` unless Keras computes with TensorFlow.

    Args:
        name: name of Keras's backend; None or "" for its default, which is TensorFlow.
    """
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
    ours = metadata.metadata("tf_dgc")
    ranges = {"python": SpecifierSet(ours["Requires-Python"])}
    for line in ours.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            ranges[requirement.name] = requirement.specifier
    return ranges


def _is_newer(version: str, supported: SpecifierSet) -> bool:
    """Whether a version outside of a range is above it."""
    lower = [bound for bound in supported if bound.operator in (">=", ">")]
    return all(bound.contains(version, prereleases=True) for bound in lower)
