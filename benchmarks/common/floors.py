"""The floor of a method: the time to read and write the arrays of its definition.

Arrays with a value per entry are g the gradient, r the residual, s the sum over
workers, w the weights, m the momentum of the inner SGD, u DGC's velocity and v Adam's
second moment; other letters are a method's own state. p is a payload of the measured
size. P are the payloads of all workers, or the one payload of a method that sums them
on the way. "g r -> r p" is one pass that reads the arrays before the arrow and writes
those after it. A scale of the whole tensor requires another pass over the values.
Scales of blocks, positions and computation cost nothing.
"""

import ctypes

import numpy as np
import tensorflow as tf

from common import kernels
from tf_dgc import compressors

_SPARSE = ["g r -> r p"]
_SCALED = ["g r ->", "g r -> r p"]

COMPRESS = {
    "adacomp": _SPARSE,
    "atomo": ["g ->", "g -> p"],  # a sketch of the range; the projection onto it
    "bfloat16": ["g -> p"],
    "chunked_top_k": _SPARSE,
    "count_sketch": _SPARSE,
    "demo": ["g r -> r", "r ->", "r -> r p"],  # transform; selection; inverse
    "dgc": ["g r u -> r u p"],
    "dgc_adamw": ["g v r -> v r p"],  # no velocity: delays act as momentum
    "diana": ["g h -> h p"],
    "ecq": ["g h -> h p"],
    "ef_sign_sgd": _SCALED,
    "float16": ["g -> p"],
    "global_top_k": _SPARSE,
    "laq": ["g q ->", "g q -> p", "q p -> q"],  # radius; innovation; update of q
    "lgc": _SPARSE,
    "natural": ["g -> p"],
    "none": ["g ->"],  # check for finite values
    "one_bit": _SCALED,
    "power_sgd": ["g r -> r p", "r -> p", "r -> r"],  # P; Q; residual
    "qsgd": ["g -> p"],
    "random_k": _SPARSE,
    "rotated_quantization": ["g -> p"],
    "sampled_threshold": _SPARSE,
    "sbc": _SPARSE,
    "scale_com": _SPARSE,
    "sign_sgd": ["g -> p"],
    "signum": ["g h -> h p"],
    "stc": _SPARSE,
    "tern_grad": ["g ->", "g -> p"],
    "threshold": _SPARSE,
    "top_k": _SPARSE,
    "two_bit": _SPARSE,
    "uniform_8bit": _SCALED,
    "variance_based": ["g r h -> r h p"],
}

_DECODE = ["P -> s"]
_OTHER_DECODE = {
    "none": [],  # the all-reduce returns the sum
    "diana": ["P H -> H s"],
    "laq": ["P s -> s"],
}
_UPDATE = ["s m w -> m w"]
_OTHER_UPDATE = {
    "adamw": ["s m v w -> m v w"],
    "dgc": [],  # a sparse update
    "dgc_adamw": ["w -> w"],  # weight decay, and a sparse update
}


def compress_passes(name):
    """Return the passes of compressing; None for an optimizer without compression.

    The default is one pass over gradient and, with error feedback, residual.
    """
    if name in COMPRESS:
        return COMPRESS[name]
    if name not in compressors.METHODS:
        return None
    feedback = compressors.METHODS[name].error_feedback in ("required", "default")
    return _SPARSE if feedback else ["g -> p"]


class Floors:
    """The floors of a method, as functions to time in turn with it.

    Args:
        name: name of the method, or of an optimizer alone.
        sizes: numbers of entries of the tensors.
        payload: bytes that one worker sends.
        summed: whether payloads are summed on the way.
        threads: number of threads.
    """

    def __init__(self, name, sizes, payload, summed, threads):
        self._sizes = np.array(sizes, np.int64)
        self._words = min(1.0, payload / 4 / sum(sizes))
        self._summed = summed
        self._threads = threads
        self._library = kernels.load()
        self._arrays = {}
        self._passes = {"update": _OTHER_UPDATE.get(name, _UPDATE)}
        if compress := compress_passes(name):
            self._passes |= {"compress": compress}
            self._passes |= {"decode": _OTHER_DECODE.get(name, _DECODE)}

    def function(self, part, num_workers=1):
        """Return a function that reads and writes the arrays of a part.

        Args:
            part: "compress", "decode" or "update".
            num_workers: number of workers whose payloads are decoded.
        """
        num_payloads = 1 if self._summed else num_workers
        payloads = [f"p{i}" for i in range(num_payloads)]
        passes = [_parse_pass(text, payloads) for text in self._passes[part]]
        names = sorted({name for sides in passes for side in sides for name in side})
        arrays = [self._array(name) for name in names]
        addresses = (ctypes.c_void_p * len(names))(*(a.ctypes.data for a in arrays))
        words = np.array(
            [self._words if name[0] == "p" else 1.0 for name in names], np.float64
        )
        masks = [
            np.array([_mask(side, names) for side in sides], np.uint64)
            for sides in (zip(*passes, strict=True) if passes else ([], []))
        ]

        def run():
            self._library.stream(
                kernels.pointer(self._sizes), kernels.length(len(self._sizes)),
                addresses, kernels.pointer(words), ctypes.c_int(len(names)),
                *map(kernels.pointer, masks), ctypes.c_int(len(passes)),
                ctypes.c_int(self._threads),
            )  # fmt: skip

        return run

    def _array(self, name):
        if name not in self._arrays:
            entries = int(self._sizes.sum())
            size = int(self._words * entries) + 1 if name[0] == "p" else entries
            # TensorFlow's allocator, as for the methods: NumPy's has larger pages.
            tensor = tf.random.normal([size])
            self._arrays[name] = np.asarray(memoryview(tensor))
        return self._arrays[name]


def _parse_pass(text, payloads):
    """Return the names of the arrays that a pass reads, and those that it writes."""
    sides = []
    for side in text.split("->"):
        names = ["p0" if name == "p" else name for name in side.split() if name != "P"]
        sides.append(names + (payloads if "P" in side.split() else []))
    return sides


def _mask(side, names):
    return sum(1 << names.index(name) for name in side)
