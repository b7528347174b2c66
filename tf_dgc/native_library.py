"""The native operations: found, checked, loaded, and if not, why not.

A library is built while the package is made or installed (`custom_ops/builder.py`) and
belongs to one minor version of TensorFlow, after which its folder is called; a stamp
beside it says what it was built for. Without one for this TensorFlow everything works
by TensorFlow operations, more slowly.
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
_COMPILED = (  # folders of sources
    *("cpu", "cuda", "cuda_engine", "engine", "methods", "tensorflow"),
)
_LIBRARY = _DIRECTORY / ".".join(tf.__version__.split(".")[:2]) / "libtf_dgc_ops.so"
_STAMP = _LIBRARY.with_name("stamp.json")
_VARIABLE = "TF_DGC_NATIVE"
_CUDA_VARIABLE = "TF_DGC_CUDA"
ADVICE = (
    "To get the native operations, install tf_dgc again in this environment, with a "
    "C++ compiler at hand: `TF_DGC_NATIVE=1 pip install --force-reinstall --no-deps "
    "--no-cache-dir` and the path or address it was installed from; it then stops "
    "with the compiler's message if it cannot build them."
)


class NativeLibrary(NamedTuple):
    """The state of the native operations in this process.

    Attributes:
        library: module with one function per operation, or None.
        reason: sentence that says why it is there or is not.
        wanted: whether the environment asks for it: `TF_DGC_NATIVE` is not 0.
        stamp: texts that say what the library was built with and for, by name; empty
            without one.
    """

    library: Any
    reason: str
    wanted: bool
    stamp: dict[str, str]

    @property
    def vector_level(self) -> str:
        """The vector code in use: avx512, avx2 or baseline; empty without a library."""
        if self.library is None:
            return ""
        return _text("tf_dgc_vector_level")

    @property
    def cuda(self) -> str:
        """What the CUDA kernels were built with; empty if they were not."""
        return self.stamp.get("cuda", "") if self.library is not None else ""

    @property
    def cuda_problem(self) -> str:
        """Why the CUDA kernels are not used here; empty if they are.

        They ran on a GPU, but TensorFlow has not called them there yet
        (docs/gpu.md), so using them is the user's decision.
        """
        if not self.cuda:
            return "they were not built"
        if os.environ.get(_CUDA_VARIABLE) != "1":
            return f"{_CUDA_VARIABLE}=1 is not set"
        return _text("tf_dgc_cuda_problem")

    @property
    def cuda_methods(self) -> list[str]:
        """Names of the engine's methods that have CUDA kernels."""
        return _text("tf_dgc_cuda_engine_methods").splitlines() if self.cuda else []


@functools.cache
def load_library() -> NativeLibrary:
    """Load the native operations, at the first call.

    Raises:
        ImportError: if `TF_DGC_NATIVE=1` demands them and they cannot be loaded.
        ValueError: if `TF_DGC_NATIVE` is something else than 0 or 1.
    """
    wish = os.environ.get(_VARIABLE, "")
    if wish not in ("", "0", "1"):
        raise ValueError(
            f"{_VARIABLE} must be 1 (the native operations are needed), 0 (they are "
            f"not to be used) or unset. Received: {_VARIABLE}={wish}"
        )
    if wish == "0":
        return NativeLibrary(None, f"{_VARIABLE}=0 forbids it", False, {})
    stamp, wrong = check_stamp(_LIBRARY, _STAMP)
    library = None
    if not wrong:
        try:
            library = tf.load_op_library(str(_LIBRARY))
        except (tf.errors.OpError, OSError) as error:
            wrong = f"TensorFlow could not load it: {error}"
    if wrong and wish == "1":
        raise ImportError(
            f"{_VARIABLE}=1 asks for the native operations of tf_dgc, but {wrong}. "
            f"{ADVICE}"
        )
    return NativeLibrary(library, wrong or "built for this TensorFlow", True, stamp)


def check_stamp(
    library: pathlib.Path, stamp: pathlib.Path
) -> tuple[dict[str, str], str]:
    """Return the stamp of a library, and why it must not be loaded ("" if it may).

    Args:
        library: path of the library.
        stamp: path of the JSON beside it, written when it was built.
    """
    sources = _sources()
    if not library.exists():
        return {}, _missing(library, sources)
    try:
        content = json.loads(stamp.read_text(encoding="utf-8"))
        built_for, checksum = content["tensorflow"], content["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}, f"{library} has no readable stamp, so it is not ours"
    if hashlib.sha256(library.read_bytes()).hexdigest() != checksum:
        return content, f"{library} is not the file that its stamp describes"
    if _minor(built_for) != _minor(tf.__version__):
        return content, (
            f"it was built for TensorFlow {_minor(built_for)}, "
            f"and this is {tf.__version__}"
        )
    if sources and content.get("sources") != _hash(sources):
        return content, f"the sources in {sources} changed since it was built"
    return content, ""


def _missing(library: pathlib.Path, sources: pathlib.Path | None) -> str:
    """Return what there is in place of a library."""
    others = sorted(p.parent.name for p in library.parents[1].glob(f"*/{library.name}"))
    if others:
        return (
            f"they were built for TensorFlow {' and '.join(others)}, "
            f"and this is {tf.__version__}"
        )
    where = f" (this is the source tree {sources.parent})" if sources else ""
    return f"it was not built when the package was installed{where}"


@functools.cache
def warn_if_missing() -> None:
    """Warn once per process if the native operations were expected and are missing."""
    state = load_library()
    if state.wanted and state.library is None:
        warnings.warn(
            f"tf_dgc runs without its native operations: {state.reason}. Steps take "
            f"several times as long, with the same results. {ADVICE} To run without "
            f"them and without this warning, set {_VARIABLE}=0. `tf-dgc doctor` tells "
            "more.",
            RuntimeWarning,
            stacklevel=3,
        )


def _text(function: str) -> str:
    """Call a function of the library that returns a string, or NULL."""
    call = getattr(ctypes.CDLL(str(_LIBRARY)), function)
    call.restype = ctypes.c_char_p
    return (call() or b"").decode()


def _minor(version: str) -> str:
    return ".".join(str(version).split(".")[:2])


def _sources() -> pathlib.Path | None:
    """Return the directory of the C++ sources if this is a source tree, else None.

    What lies beside an installed package may be called `custom_ops`, too.
    """
    sources = _DIRECTORY.parents[1] / "custom_ops"
    try:
        project = (sources.parent / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return None
    ours = re.search(r'^name = "tf_dgc"$', project, re.MULTILINE)
    return sources if ours and (sources / "builder.py").is_file() else None


def _hash(sources: pathlib.Path) -> str:
    """Return what `custom_ops/builder.py` stamps."""
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*/*")):
        if path.parent.name in _COMPILED and path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
