"""The engine's CUDA kernels through ctypes, as `cuda_library.py` has those of DGC.

The same calls run them on the emulated device, and the CPU's engine (`Cpu`), which
takes tensors in the same form.
"""

import ctypes

from common.cuda_library import addresses, check, declare

_I32, _I64, _U32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
_POINTER, _TEXT = ctypes.c_void_p, ctypes.c_char_p


class Tensor(ctypes.Structure):
    """`TfDgcCoded`; pointers to arrays are addresses, or None."""

    _fields_ = (
        ("method", _TEXT),
        ("parameters", ctypes.POINTER(ctypes.c_float)),
        ("num_parameters", _I32),
        ("vector", _I32),
        ("size", _I64),
        ("columns", _I64),
        ("index", _I32),
        ("gradient_type", _I32),
        ("gradient", _POINTER),
        ("velocity", _POINTER),
        ("residual", _POINTER),
        ("moment", _POINTER),
        ("divisor", _POINTER),
    )


class Vector(ctypes.Structure):
    """`TfDgcVector`."""

    _fields_ = (("data", _POINTER), ("type", _I32))


class Coding(ctypes.Structure):
    """`TfDgcCoding`."""

    _fields_ = (
        ("rule", _I32),
        ("momentum", ctypes.c_float),
        ("fingerprint", _U32),
        ("worker", _I32),
        ("seed", _I64),
    )


def tensors(descriptions):
    """Return a C array of tensors from dictionaries of the fields of `Tensor`.

    `method` is a text and `parameters` a list; a tensor is gathered unless it has a
    `vector`.
    """
    made = []
    for description in descriptions:
        given = {"vector": -1, "columns": 1, **description}
        parameters = given.pop("parameters", [])
        given["method"] = given["method"].encode()
        given["parameters"] = (ctypes.c_float * len(parameters))(*parameters)
        made.append(Tensor(num_parameters=len(parameters), **given))
    array = (Tensor * len(made))(*made)
    array.kept = made  # what its pointers are to
    return array


def vectors(pairs):
    """Return a C array of vectors from pairs of an address and a type."""
    return (Vector * len(pairs))(*(Vector(data, kind) for data, kind in pairs))


class Engine:
    """The functions of api.h. Arguments that are on the device are addresses."""

    def __init__(self, path):
        self._c = ctypes.CDLL(str(path))
        self._methods = declare(self._c, "tf_dgc_cuda_engine_methods", _TEXT)
        size = declare(self._c, "tf_dgc_cuda_encode_workspace", _I64, _POINTER, _I32)
        self._encode_workspace = size
        self._words = declare(self._c, "tf_dgc_cuda_engine_words", _I64, _POINTER, _I32)
        self._numbers = declare(
            self._c, "tf_dgc_cuda_engine_numbers", _I64, _POINTER, _I32, _I32
        )
        self._sum_workspace = declare(
            self._c, "tf_dgc_cuda_sum_workspace", _I64, _POINTER, _I32, _I32
        )
        self._encode = declare(
            *(self._c, "tf_dgc_cuda_encode", _TEXT, _POINTER, _POINTER, _I32),
            *(_POINTER, _POINTER, _POINTER, _POINTER, _I32, *[_POINTER] * 3),
        )
        self._sum = declare(
            *(self._c, "tf_dgc_cuda_sum", _TEXT, _POINTER, _POINTER, _I32, _U32),
            *(_POINTER, _I32, _I64, _POINTER, _I32, *[_POINTER] * 5),
        )

    def methods(self):
        """Return the names of the methods that have kernels."""
        return self._methods().decode().splitlines()

    def words(self, tensors):
        """Return how many words a step's buffer has; negative: impossible."""
        return self._words(tensors, len(tensors))

    def numbers(self, tensors, vector):
        """Return how many numbers a vector has; negative: impossible."""
        return self._numbers(tensors, len(tensors), vector)

    def encode_workspace(self, tensors):
        """Return the bytes of device memory that a step needs; negative: impossible."""
        return self._encode_workspace(tensors, len(tensors))

    def sum_workspace(self, tensors, num_workers):
        """Return the bytes that decoding needs; negative: impossible."""
        return self._sum_workspace(tensors, len(tensors), num_workers)

    def encode(
        self,
        stream,
        tensors,
        coding,
        scales,
        iteration,
        vectors,
        workspace,
        words,
        all_taken,
    ):
        """Queue a step on a stream.

        Raises:
            ValueError: with what the library says.
        """
        start = (stream, tensors, len(tensors), ctypes.byref(coding), scales, iteration)
        rest = (vectors, len(vectors), workspace, words, all_taken)
        check(self._encode(*start, *rest))

    def sum(
        self,
        stream,
        tensors,
        fingerprint,
        buffers,
        num_workers,
        num_words,
        vectors,
        targets,
        rate,
        finite,
        workspace,
        status,
    ):
        """Queue a decoding; `targets` is a list of addresses, `rate` one, or None.

        Raises:
            ValueError: with what the library says.
        """
        start = (stream, tensors, len(tensors), fingerprint, buffers, num_workers)
        middle = (num_words, vectors, len(vectors), addresses(targets), rate)
        check(self._sum(*start, *middle, finite, workspace, status))


class Cpu:
    """The CPU's engine without TensorFlow; on host addresses."""

    def __init__(self, path):
        library = ctypes.CDLL(str(path))
        self._encode = declare(
            *(library, "tf_dgc_cpu_encode", None, _POINTER, _I32),
            *(_POINTER, _POINTER, _POINTER, _POINTER, _I32, _POINTER),
        )
        self._sum = declare(
            *(library, "tf_dgc_cpu_sum", _I32, _POINTER, _I32, _U32, _POINTER, _I32),
            *(
                _I64,
                _POINTER,
                _I32,
                _POINTER,
                _POINTER,
                _POINTER,
                ctypes.c_char_p,
                _I32,
            ),
        )

    def encode(self, tensors, coding, scales, iteration, vectors, words):
        """Do the step at once."""
        start = (tensors, len(tensors), ctypes.byref(coding), scales, iteration)
        self._encode(*start, vectors, len(vectors), words)

    def sum(
        self,
        tensors,
        fingerprint,
        buffers,
        num_workers,
        num_words,
        vectors,
        targets,
        rate,
        finite,
    ):
        """Decode at once; return the number of non-finite workers and what is wrong."""
        text = ctypes.create_string_buffer(200)
        start = (tensors, len(tensors), fingerprint, buffers, num_workers, num_words)
        middle = (vectors, len(vectors), addresses(targets), rate, finite)
        nonfinite = self._sum(*start, *middle, text, len(text))
        return nonfinite, text.value.decode()
