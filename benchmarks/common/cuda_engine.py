"""The engine's CUDA kernels through ctypes; `cuda_library.py` has those of DGC.

The same calls run on a GPU and on the emulated device. `Cpu` is the CPU's engine, which
takes the same structures.
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
    structures = []
    for description in descriptions:
        fields = {"vector": -1, "columns": 1, **description}
        parameters = fields.pop("parameters", [])
        fields["method"] = fields["method"].encode()
        fields["parameters"] = (ctypes.c_float * len(parameters))(*parameters)
        structures.append(Tensor(num_parameters=len(parameters), **fields))
    array = (Tensor * len(structures))(*structures)
    array.structures = structures  # own the memory that the array points to
    return array


def vectors(pairs):
    """Return a C array of vectors from pairs of an address and a type."""
    return (Vector * len(pairs))(*(Vector(data, dtype) for data, dtype in pairs))


class Engine:
    """The functions of api.h. Arguments on the device are addresses."""

    def __init__(self, path):
        library = ctypes.CDLL(str(path))
        self._methods = declare(library, "tf_dgc_cuda_engine_methods", _TEXT)
        self._encode_workspace = declare(
            library, "tf_dgc_cuda_encode_workspace", _I64, _POINTER, _I32
        )
        self._words = declare(library, "tf_dgc_cuda_engine_words", _I64, _POINTER, _I32)
        self._numbers = declare(
            library, "tf_dgc_cuda_engine_numbers", _I64, _POINTER, _I32, _I32
        )
        self._sum_workspace = declare(
            library, "tf_dgc_cuda_sum_workspace", _I64, _POINTER, _I32, _I32
        )
        self._encode = declare(
            *(library, "tf_dgc_cuda_encode", _TEXT, _POINTER, _POINTER, _I32),
            *(_POINTER, _POINTER, _POINTER, _POINTER, _I32, *[_POINTER] * 3),
        )
        self._sum = declare(
            *(library, "tf_dgc_cuda_sum", _TEXT, _POINTER, _POINTER, _I32, _U32),
            *(_POINTER, _I32, _I64, _POINTER, _I32, *[_POINTER] * 5),
        )

    def methods(self):
        """Return the names of the methods that have kernels."""
        return self._methods().decode().splitlines()

    def words(self, tensors):
        """Return the number of words of a step's buffer; negative if impossible."""
        return self._words(tensors, len(tensors))

    def numbers(self, tensors, vector):
        """Return the number of entries of a vector; negative if impossible."""
        return self._numbers(tensors, len(tensors), vector)

    def encode_workspace(self, tensors):
        """Return the bytes of device memory of a step; negative if impossible."""
        return self._encode_workspace(tensors, len(tensors))

    def sum_workspace(self, tensors, num_workers):
        """Return the bytes of device memory of decoding; negative if impossible."""
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
            ValueError: with the library's message.
        """
        error = self._encode(
            stream, tensors, len(tensors), ctypes.byref(coding), scales, iteration,
            vectors, len(vectors), workspace, words, all_taken,
        )  # fmt: skip
        check(error)

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
            ValueError: with the library's message.
        """
        error = self._sum(
            stream, tensors, len(tensors), fingerprint, buffers, num_workers, num_words,
            vectors, len(vectors), addresses(targets), rate, finite, workspace, status,
        )  # fmt: skip
        check(error)


class Cpu:
    """The CPU's engine without TensorFlow, on host addresses."""

    def __init__(self, path):
        library = ctypes.CDLL(str(path))
        self._encode = declare(
            *(library, "tf_dgc_cpu_encode", None, _POINTER, _I32),
            *(_POINTER, _POINTER, _POINTER, _POINTER, _I32, _POINTER),
        )
        self._sum = declare(
            *(library, "tf_dgc_cpu_sum", _I32, _POINTER, _I32, _U32, _POINTER, _I32),
            *(_I64, _POINTER, _I32, *[_POINTER] * 3, ctypes.c_char_p, _I32),
        )

    def encode(self, tensors, coding, scales, iteration, vectors, words):
        """Run a step."""
        self._encode(
            tensors, len(tensors), ctypes.byref(coding), scales, iteration,
            vectors, len(vectors), words,
        )  # fmt: skip

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
        """Decode; return the number of non-finite workers, and an error message."""
        message = ctypes.create_string_buffer(200)
        nonfinite = self._sum(
            tensors, len(tensors), fingerprint, buffers, num_workers, num_words,
            vectors, len(vectors), addresses(targets), rate, finite,
            message, len(message),
        )  # fmt: skip
        return nonfinite, message.value.decode()
