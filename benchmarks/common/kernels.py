"""Compiles `kernels.cc` together with the package's C++ code, and calls it."""

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
# The package's flags; the floor also uses this machine's instructions.
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fopenmp", f"-I{_CPU}"]


def load():
    """Return the library; the first call compiles it into a cache, in some seconds."""
    # Threads that spin would take processors from the next measurement.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    content = b"".join(p.read_bytes() for p in [*_SOURCES, *sorted(_CPU.glob("*.h"))])
    name = f"kernels_{hashlib.sha256(content).hexdigest()[:16]}.so"
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    cached = pathlib.Path(caches) / "tf_dgc" / name
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as directory:
            objects, library = f"{directory}/kernels.o", f"{directory}/kernels.so"
            _compile("-march=native", "-c", _SOURCES[0], "-o", objects)
            _compile("-shared", objects, *_SOURCES[1:], "-o", library)
            os.replace(library, cached)
    kernels = ctypes.CDLL(str(cached))
    kernels.encode.restype = ctypes.c_int64
    return kernels


def _compile(*arguments):
    subprocess.run(["g++", *_FLAGS, *arguments], check=True)


def pointer(array):
    """Return the address of a NumPy array as a C pointer."""
    return array.ctypes.data_as(ctypes.c_void_p)


def length(value):
    """Return a number as the C type of lengths."""
    return ctypes.c_int64(value)


def floats(n, seed):
    """Return n normally distributed float32 numbers."""
    return np.random.default_rng(seed).standard_normal(n, np.float32)
