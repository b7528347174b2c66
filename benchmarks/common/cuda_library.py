"""DGC's CUDA kernels through ctypes: the interface of `custom_ops/cuda/api.h`.

For `tests/gpu` and `gpu_compress.py`; needs neither TensorFlow nor, by itself, a GPU.
The same calls run on a GPU and on the emulated device, whose memory is the host's.
`Cpu` has the CPU operations, which take the same structures.
"""

import ctypes
import math
import os
import pathlib
import shutil
import subprocess

import numpy as np

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "custom_ops"
NAMES = {
    "cuda": "libtf_dgc_cuda.so",
    "emulated": "libtf_dgc_emulated.so",
    "cpu": "libtf_dgc_cpu.so",
}
GRADIENT_TYPES = {"float32": 0, "bfloat16": 2, "float16": 3}
VALUE_TYPES = {"float32": 0, "bfloat16": 2, "float16": 3, "sign": 4, "exempt": 5}
VALUE_TYPES |= {"mxint8": 6, "mxfp4": 7, "exempt:bfloat16": 8, "exempt:mxint8": 9}
RULES = {"none": 0, "momentum": 1, "nesterov": 2}
HINT_BYTES = 12
STATUS_BYTES = 16
STATUS = np.dtype([("error", np.uint64), ("nonfinite", np.int32), ("", np.int32)])

_I32, _I64, _U32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
_POINTER, _TEXT = ctypes.c_void_p, ctypes.c_char_p


class Tensor(ctypes.Structure):
    """`TfDgcTensor`; pointers are addresses, or None."""

    _fields_ = (
        ("size", _I64),
        ("k", _I64),
        ("gradient", _POINTER),
        ("velocity", _POINTER),
        ("residual", _POINTER),
        ("gradient_type", _I32),
        ("value_type", _I32),
        ("largest", ctypes.c_float),
        ("moment", _POINTER),
        ("divisor", _POINTER),
    )


class Settings(ctypes.Structure):
    """`TfDgcSettings`."""

    _fields_ = (
        ("rule", _I32),
        ("factor_masking", _I32),
        ("momentum", ctypes.c_float),
        ("fingerprint", _U32),
    )


def tensors(descriptions):
    """Return a C array of tensors from dictionaries of the fields of `Tensor`.

    Without `largest` the values that are sent are not bounded.
    """
    unbounded = {"largest": math.inf}
    return (Tensor * len(descriptions))(
        *(Tensor(**{**unbounded, **d}) for d in descriptions)
    )


def build(kind):
    """Build a library of `NAMES` if it is missing or stale, and return its path.

    Raises:
        FileNotFoundError: if there is neither the library nor a compiler for it.
        RuntimeError: with the end of the compiler's output.
    """
    path = SOURCE / "build" / NAMES[kind]
    compiler = os.environ.get("NVCC", "nvcc") if kind == "cuda" else "g++"
    if shutil.which(compiler) is None:
        if path.exists():
            return path
        raise FileNotFoundError(
            f"{path} does not exist, and there is no {compiler} to build it; see "
            "docs/research/gpu.md"
        )
    command = ["make", "-s", "-C", str(SOURCE), f"build/{NAMES[kind]}"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {finished.stderr[-2000:]}")
    return path


class Library:
    """The functions of api.h. Arguments on the device are addresses."""

    def __init__(self, path):
        library = ctypes.CDLL(str(path))
        self._words = declare(library, "tf_dgc_cuda_words", _I64, _POINTER, _I32)
        self._compress_workspace = declare(
            library, "tf_dgc_cuda_compress_workspace", _I64, _POINTER, _I32
        )
        self._decode_workspace = declare(
            library, "tf_dgc_cuda_decode_workspace", _I64, _POINTER, _I32, _I32
        )
        self._describe = declare(
            *(library, "tf_dgc_cuda_describe", None),
            *(ctypes.c_uint64, ctypes.c_char_p, _I32),
        )
        self._compress = declare(
            *(library, "tf_dgc_cuda_compress", _TEXT, _POINTER, _POINTER, _I32),
            *[_POINTER] * 6,
        )
        self._decode = declare(
            *(library, "tf_dgc_cuda_decode", _TEXT, _POINTER, _POINTER, _I32, _U32),
            *(_POINTER, _I32, _I64, *[_POINTER] * 4),
        )

    def words(self, tensors):
        """Return the number of words of a step's buffer; negative if impossible."""
        return self._words(tensors, len(tensors))

    def compress_workspace(self, tensors):
        """Return the bytes of device memory of a step; negative if impossible."""
        return self._compress_workspace(tensors, len(tensors))

    def decode_workspace(self, tensors, num_workers):
        """Return the bytes of device memory of decoding; negative if impossible."""
        return self._decode_workspace(tensors, len(tensors), num_workers)

    def compress(
        self, stream, tensors, settings, scales, offsets, hints, workspace, words
    ):
        """Queue a step on a stream.

        Raises:
            ValueError: with the library's message.
        """
        error = self._compress(
            stream, tensors, len(tensors), ctypes.byref(settings),
            scales, offsets, hints, workspace, words,
        )  # fmt: skip
        check(error)

    def decode(
        self,
        stream,
        tensors,
        fingerprint,
        buffers,
        num_workers,
        num_words,
        targets,
        rate,
        workspace,
        status,
    ):
        """Queue a decoding; `targets` is a list of addresses, `rate` one, or None.

        Raises:
            ValueError: with the library's message.
        """
        error = self._decode(
            stream, tensors, len(tensors), fingerprint, buffers, num_workers,
            num_words, addresses(targets), rate, workspace, status,
        )  # fmt: skip
        check(error)

    def describe(self, error, size=200):
        """Return the message of a status's error."""
        message = ctypes.create_string_buffer(size)
        self._describe(error, message, size)
        return message.value.decode()


class Cpu:
    """The CPU operations (`custom_ops/cpu`) without TensorFlow, on host addresses."""

    def __init__(self, path):
        library = ctypes.CDLL(str(path))
        self._compress = declare(
            library, "tf_dgc_cpu_compress", None, _POINTER, _I32, *[_POINTER] * 4
        )
        self._decode = declare(
            *(library, "tf_dgc_cpu_decode", _I32, _POINTER, _I32, _U32, _POINTER),
            *(_I32, _I64, _POINTER, _POINTER, ctypes.c_char_p, _I32),
        )

    def compress(self, tensors, settings, scales, offsets, words):
        """Run a step."""
        self._compress(
            tensors, len(tensors), ctypes.byref(settings), scales, offsets, words
        )

    def decode(
        self, tensors, fingerprint, buffers, num_workers, num_words, targets, rate
    ):
        """Decode; return the number of non-finite workers, and an error message."""
        message = ctypes.create_string_buffer(200)
        nonfinite = self._decode(
            tensors, len(tensors), fingerprint, buffers, num_workers, num_words,
            addresses(targets), rate, message, len(message),
        )  # fmt: skip
        return nonfinite, message.value.decode()


def declare(library, name, result, *arguments):
    """Return a function of a library, with the types of its result and arguments."""
    function = library[name]
    function.restype = result
    function.argtypes = arguments
    return function


def addresses(pointers):
    """Return a C array of addresses."""
    return (_POINTER * len(pointers))(*pointers)


def check(error):
    """Raise a ValueError with a function's error message, unless it is None."""
    if error is not None:
        raise ValueError(error.decode())
