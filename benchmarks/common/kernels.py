"""Compile `kernels.cc` beside the package's own C++ code, and call it."""

import ctypes
import hashlib
import os
import pathlib
import subprocess
import tempfile

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
_CPU = _HERE.parents[1] / "custom_ops" / "cpu"
_SOURCES = [
    _HERE / "kernels.cc",
    *(_CPU / f"{n}.cc" for n in ("wire", "values", "update", "rules", "parallel")),
]
# As the package is compiled; the floor may use whatever this machine has.
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fopenmp", f"-I{_CPU}"]


def load():
    """Return the library; it is compiled once, in some seconds, and kept in a cache."""
    # Threads that wait in a loop would take processors from what is measured next.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    content = b"".join(p.read_bytes() for p in [*_SOURCES, *sorted(_CPU.glob("*.h"))])
    name = f"kernels_{hashlib.sha256(content).hexdigest()[:16]}.so"
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    cached = pathlib.Path(caches) / "tf_dgc" / name
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as directory:
            kernels, library = f"{directory}/kernels.o", f"{directory}/kernels.so"
            _compile("-march=native", "-c", _SOURCES[0], "-o", kernels)
            _compile("-shared", kernels, *_SOURCES[1:], "-o", library)
            os.replace(library, cached)
    loaded = ctypes.CDLL(str(cached))
    loaded.encode.restype = ctypes.c_int64
    return loaded


def _compile(*arguments):
    subprocess.run(["g++", *_FLAGS, *arguments], check=True)


def pointer(array):
    """Return the address of a NumPy array, for a call."""
    return array.ctypes.data_as(ctypes.c_void_p)


def length(value):
    """Return a number as the C type of lengths."""
    return ctypes.c_int64(value)


def floats(n, seed):
    """Return n float32 numbers, normally distributed."""
    return np.random.default_rng(seed).standard_normal(n, np.float32)
