"""Finds, checks and loads the library of native operations.

The library is built when the package is built or installed (`custom_ops/builder.py`),
for one minor version of TensorFlow, which names its folder; a stamp says what it was
built for. Without a library for this TensorFlow, stock TensorFlow operations do the
same, more slowly.
"""

import ctypes
import functools
import hashlib
import json
import os
import pathlib
import re
import warnings
from typing import Any, NamedTuple

import tensorflow as tf

_DIRECTORY = pathlib.Path(__file__).parent / "_native"
_SOURCE_FOLDERS = ("cpu", "cuda", "cuda_engine", "engine", "methods", "tensorflow")
_LIBRARY = _DIRECTORY / ".".join(tf.__version__.split(".")[:2]) / "libtf_dgc_ops.so"
_STAMP = _LIBRARY.with_name("stamp.json")
_VARIABLE = "TF_DGC_NATIVE"
_CUDA_VARIABLE = "TF_DGC_CUDA"
ADVICE = (
    "To get the native operations, reinstall tf_dgc in this environment, with a C++ "
    "compiler available: `TF_DGC_NATIVE=1 pip install --force-reinstall --no-deps "
    "--no-cache-dir` and the path or address it was installed from; this stops with "
    "the compiler's message if it cannot build them."
)


class NativeLibrary(NamedTuple):
    """The native operations in this process."""

    library: Any  # module with one function per operation, or None
    reason: str  # text that says why the library is or is not loaded
    enabled: bool  # whether `TF_DGC_NATIVE` is not 0
    stamp: dict[str, str]  # by name; empty without

    @property
    def vector_level(self) -> str:
        """The vector code in use: avx512, avx2 or baseline; empty without a library."""
        return _call("tf_dgc_vector_level") if self.library is not None else ""

    @property
    def cuda(self) -> str:
        """The compiler of the CUDA kernels; empty if they were not built."""
        return self.stamp.get("cuda", "") if self.library is not None else ""

    @property
    def cuda_problem(self) -> str:
        """Why the CUDA kernels cannot be used, as far as known without a step."""
        if cuda_setting() == "0":
            return f"{_CUDA_VARIABLE}=0 disables them"
        if not self.cuda:
            return "they were not built"
        return _call("tf_dgc_cuda_problem")

    @property
    def cuda_methods(self) -> list[str]:
        """Names of the engine's methods that have CUDA kernels."""
        return _call("tf_dgc_cuda_engine_methods").splitlines() if self.cuda else []


def cuda_setting() -> str:
    """Return the value of `TF_DGC_CUDA`: 1, 0 or empty."""
    setting = os.environ.get(_CUDA_VARIABLE, "")
    if setting not in ("", "0", "1"):
        raise ValueError(
            f"{_CUDA_VARIABLE} must be 1 (the CUDA kernels are required on GPUs), 0 "
            "(they are not used) or unset (they are if possible). Received: "
            f"{_CUDA_VARIABLE}={setting}"
        )
    return setting


@functools.cache
def load_library() -> NativeLibrary:
    """Load the native operations, at the first call."""
    setting = os.environ.get(_VARIABLE, "")
    if setting not in ("", "0", "1"):
        raise ValueError(
            f"{_VARIABLE} must be 1 (the native operations are required), 0 (they are "
            f"not used) or unset. Received: {_VARIABLE}={setting}"
        )
    if setting == "0":
        return NativeLibrary(None, f"{_VARIABLE}=0 disables them", False, {})
    stamp, problem = check_stamp(_LIBRARY, _STAMP)
    library = None
    if not problem:
        try:
            library = tf.load_op_library(str(_LIBRARY))
        except (tf.errors.OpError, OSError) as error:
            problem = f"TensorFlow could not load it: {error}"
    if problem and setting == "1":
        raise ImportError(
            f"{_VARIABLE}=1 requires the native operations of tf_dgc, but {problem}. "
            f"{ADVICE}"
        )
    return NativeLibrary(library, problem or "built for this TensorFlow", True, stamp)


@functools.cache
def warn_if_missing() -> None:
    """Warn once per process if the native operations are enabled and missing."""
    native = load_library()
    if native.enabled and native.library is None:
        warnings.warn(
            f"tf_dgc runs without its native operations: {native.reason}. "
            f"Compression takes several times as long, with the same results. {ADVICE} "
            "To run without them and without this warning, set "
            f"{_VARIABLE}=0. `tf-dgc doctor` prints details.",
            RuntimeWarning,
            stacklevel=3,
        )


def check_stamp(
    library: pathlib.Path, stamp: pathlib.Path
) -> tuple[dict[str, str], str]:
    """Return a library's JSON stamp, and why it must not be loaded ("" if it may)."""
    sources = _source_directory()
    if not library.exists():
        return {}, _describe_missing(library, sources)
    try:
        content = json.loads(stamp.read_text(encoding="utf-8"))
        built_for, checksum = content["tensorflow"], content["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}, f"{library} has no readable stamp, so tf_dgc did not build it"
    if hashlib.sha256(library.read_bytes()).hexdigest() != checksum:
        return content, f"{library} is not the file that its stamp describes"
    if _minor(built_for) != _minor(tf.__version__):
        return content, (
            f"it was built for TensorFlow {_minor(built_for)}, "
            f"and this is {tf.__version__}"
        )
    if sources and content.get("sources") != _hash_sources(sources):
        return content, f"the sources in {sources} changed since it was built"
    return content, ""


def _describe_missing(library: pathlib.Path, sources: pathlib.Path | None) -> str:
    others = sorted(p.parent.name for p in library.parents[1].glob(f"*/{library.name}"))
    if others:
        return (
            f"they were built for TensorFlow {' and '.join(others)}, "
            f"and this is {tf.__version__}"
        )
    tree = f" (this is the source tree {sources.parent})" if sources else ""
    return f"they were not built when the package was installed{tree}"


def _call(function: str) -> str:
    """Call a function of the library that returns a string, or NULL."""
    c_function = getattr(ctypes.CDLL(str(_LIBRARY)), function)
    c_function.restype = ctypes.c_char_p
    return (c_function() or b"").decode()


def _minor(version: str) -> str:
    return ".".join(str(version).split(".")[:2])


def _source_directory() -> pathlib.Path | None:
    """Return the C++ sources, if this is a source tree and not another's, else None."""
    sources = _DIRECTORY.parents[1] / "custom_ops"
    try:
        project = (sources.parent / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return None
    is_tf_dgc = re.search(r'^name = "tf_dgc"$', project, re.MULTILINE)
    return sources if is_tf_dgc and (sources / "builder.py").is_file() else None


def _hash_sources(sources: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*/*")):
        if path.parent.name in _SOURCE_FOLDERS and path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
