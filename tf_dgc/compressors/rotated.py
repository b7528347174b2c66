"""Stochastic rotated quantization: a random rotation, then a few even levels."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.codecs.bits import to_words
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import from_words, sum_decoded
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class RotatedQuantization(Quantizer):
    """Rotates at random, then rounds stochastically to k even levels, unbiased: 4 bits.

    1. Rotate: `Z = H D x / sqrt(d)` (Suresh et al., section 3), with H the
       Walsh-Hadamard matrix and D a diagonal of random signs that all workers share.
    2. Round (section 2.2): each entry of Z becomes one of its two neighbors among k
       even levels from the smallest to the largest entry, with probabilities such that
       the expected value is right.
    3. Gather, and rotate the sum back.

    A rotated vector has no outliers, so its range is small:
    `E|error|^2 <= (2 ln d + 2) / (k - 1)^2 |x|^2` (the paper's bound for one worker;
    its bound for the range, `sqrt(2) |x|`, is larger and not used here).

    The paper pads x to a power of two. Here x is cut into blocks of d entries, and the
    rest into ever smaller powers of two, each with its own range: no padding is sent. A
    payload has `ceil(log2 k)` bits per entry and two floats per block. The transform
    consists of additions in a fixed order, so that all processors rotate alike.

    Rounding errors spread to all entries of a block: weights without a gradient change
    at random, without bias.

    Error feedback is allowed if the bound is below 1; otherwise it could diverge.

    Args:
        levels: number of levels k, 2 or more; powers of two use all codes.
        block: number of entries d that are rotated together, a power of two.
    """

    name = "rotated_quantization"
    reference = "Suresh et al., Distributed mean estimation, ICML 2017"
    unbiased = True

    def __init__(self, levels: int = 16, block: int = 1024):
        self.levels = check_whole("levels", levels, 2)
        self.block = check_whole("block", block)
        if self.levels > 2**16:
            raise ValueError(
                "`levels` must be at most 2**16, the levels that float32 distinguishes "
                f"after a rotation. Received: levels={levels}"
            )
        if self.block & (self.block - 1):
            raise ValueError(
                "`block` must be a power of two, as Hadamard matrices have that many "
                f"rows. Received: block={block}"
            )
        contracts = self.error_bound(self.block) < 1
        self.error_feedback = "optional" if contracts else "forbidden"

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of two floats per block and of the codes."""
        size = math.prod(shape)
        blocks = sum(rows for rows, _ in self._blocks(size))
        return 2 * dtype.size * blocks + 4 * quantize.num_words(size, self._width)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Rotate, quantize, sum, and rotate back."""
        del state
        values = tf.reshape(values, [-1])
        size, dtype = values.shape[0], values.dtype
        signs = _signs(size, keys.shared(salt=1), dtype)
        words = self._encode(self._transform(values * signs), keys)

        def decode(words: tf.Tensor) -> tf.Tensor:
            return self._decode(words, size, dtype)

        gathered = yield AllGather(words)
        total = sum_decoded(gathered, decode, [size], dtype)
        return Result(
            signs * self._transform(total), signs * self._transform(decode(words))
        )

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        # Blocks longer than the tensor would cut it into the same ones as `longest`.
        longest = 1 << max(0, math.prod(shape).bit_length() - 1)
        block = NativeMethod.in_halves(min(self.block, longest))
        return NativeMethod(self.name, [self.levels, *block])

    def error_bound(self, size: int) -> float:
        """Return `(2 ln d + 2) / (k - 1)^2` for blocks of d entries."""
        d = min(size, self.block)
        return (2 * math.log(d) + 2) / (self.levels - 1) ** 2

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"levels": self.levels, "block": self.block}

    @property
    def _width(self) -> int:
        return (self.levels - 1).bit_length()

    def _blocks(self, size: int) -> list[tuple[int, int]]:
        """Return the (number, length) of a tensor's blocks, longest first."""
        rest = size % self.block
        whole = [(size // self.block, self.block)] if size >= self.block else []
        powers = (1 << bit for bit in reversed(range(rest.bit_length())))
        return whole + [(1, power) for power in powers if rest & power]

    def _split(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Return `[number, length]` of the blocks."""
        shapes = self._blocks(values.shape[0])
        parts = tf.split(values, [rows * length for rows, length in shapes])
        return [tf.reshape(p, s) for p, s in zip(parts, shapes, strict=True)]

    def _transform(self, values: tf.Tensor) -> tf.Tensor:
        """Multiply blocks by the Hadamard matrix over `sqrt(d)`, its own inverse."""
        return _join([_hadamard(rows) for rows in self._split(values)])

    def _encode(self, rotated: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return the ranges of the blocks, then codes 0 to k - 1."""
        codes, ranges = [], []
        for i, rows in enumerate(self._split(rotated)):
            low = tf.reduce_min(rows, axis=1, keepdims=True)
            high = tf.reduce_max(rows, axis=1, keepdims=True)
            share = tf.math.divide_no_nan(rows - low, high - low)
            exact = (self.levels - 1) * share
            rounded = quantize.stochastic_round(exact, keys.local(salt=2 + i))
            codes.append(tf.cast(tf.minimum(rounded, self.levels - 1), tf.int32))
            ranges.append(tf.concat([low, high], axis=1))
        packed = quantize.pack(_join(codes), self._width)
        return tf.concat([to_words(_join(ranges)), packed], axis=0)

    def _decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return the levels, in rotated coordinates."""
        blocks = sum(rows for rows, _ in self._blocks(size))
        split = 2 * blocks * dtype.size // 4
        ranges = from_words(words[:split], dtype, [blocks, 2])
        codes = tf.cast(quantize.unpack(words[split:], self._width, size), dtype)
        # Graphs rewrite a division by a constant to this, so eager code does the same.
        shares = self._split(codes * (1 / (self.levels - 1)))
        bounds = tf.split(ranges, [rows for rows, _ in self._blocks(size)])
        return _join(
            [
                (1 - share) * bound[:, :1] + share * bound[:, 1:]
                for share, bound in zip(shares, bounds, strict=True)
            ]
        )


def _join(parts: list[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)


def _signs(size: int, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return random signs, -1 or 1, `[size]`."""
    bits = tf.random.stateless_uniform([size], seed, maxval=2, dtype=tf.int32)
    return tf.cast(2 * bits - 1, dtype)


def _hadamard(rows: tf.Tensor) -> tf.Tensor:
    """Return the fast Walsh-Hadamard transform of float `[m, d]`, over `sqrt(d)`."""
    d = rows.shape[1]
    result = rows * np.asarray(1 / math.sqrt(d), rows.dtype.as_numpy_dtype)
    for bit in range(d.bit_length() - 1):
        pairs = tf.reshape(result, [-1, 2, 1 << bit])
        first, second = pairs[:, 0], pairs[:, 1]
        result = tf.stack([first + second, first - second], axis=1)
    return tf.reshape(result, rows.shape)
