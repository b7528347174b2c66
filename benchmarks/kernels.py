"""Compile `kernels.cc` beside the package's own C++ code, and call it."""

import ctypes
import pathlib
import subprocess
import tempfile

import numpy as np

_HERE = pathlib.Path(__file__).resolve().parent
_CPU = _HERE.parent / "custom_ops" / "cpu"
_SOURCES = [
    _HERE / "kernels.cc",
    *(_CPU / f"{n}.cc" for n in ("wire", "update", "parallel")),
]
# As the package is compiled; the floor may use whatever this machine has.
_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-fopenmp"]


def load():
    """Return the library; it is compiled at every start, in a few seconds."""
    with tempfile.TemporaryDirectory() as directory:
        library = f"{directory}/kernels.so"
        floor = f"{directory}/kernels.o"
        subprocess.run(
            ["g++", *_FLAGS[:-3], "-march=native", "-fPIC", "-fopenmp", f"-I{_CPU}"]
            + ["-c", _SOURCES[0], "-o", floor],
            check=True,
        )
        subprocess.run(
            ["g++", *_FLAGS, f"-I{_CPU}", floor, *_SOURCES[1:], "-o", library],
            check=True,
        )
        loaded = ctypes.CDLL(library)
    loaded.encode.restype = ctypes.c_int64
    return loaded


def pointer(array):
    """Return the address of a NumPy array, for a call."""
    return array.ctypes.data_as(ctypes.c_void_p)


def length(value):
    """Return a number as the C type of lengths."""
    return ctypes.c_int64(value)


def floats(n, seed):
    """Return n float32 numbers, normally distributed."""
    return np.random.default_rng(seed).standard_normal(n, np.float32)
