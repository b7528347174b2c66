"""Eight bits per entry, linear up to the largest magnitude."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.codecs.bits import to_words
from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import OneRound, from_words
from tf_dgc.compressors.random_keys import RandomKeys

_LEVELS = 127  # of each sign; -128 is never sent, so negating a code is safe


@keras.saving.register_keras_serializable(package="tf_dgc")
class Uniform8Bit(OneRound, Quantizer):
    """Rounds each entry to one of 255 evenly spaced levels: 8 bits.

    The linear quantization with which Dettmers compares: codes are integers c from -127
    to 127, and represent `c max|v| / 127`. The maximum of the tensor, or of each bucket
    of it, is part of the payload. The maximum and 0 are exact. (Dettmers prefers his
    dynamic tree type; this is what most libraries mean by 8 bits.)

    Args:
        bucket: entries that share a maximum; None for the whole tensor. One large entry
            reduces the precision of all others in its bucket.
        stochastic: whether to round stochastically, unbiased, instead of to the nearest
            level. Error feedback, otherwise on by default, is then allowed only for
            buckets whose error bound is below 1: of fewer than 64,516 entries.
    """

    name = "uniform_8bit"
    reference = "Dettmers, 8-bit approximations for parallelism, ICLR 2016"

    def __init__(self, bucket: int | None = None, stochastic: bool = False):
        if bucket is not None:
            bucket = check_whole("bucket", bucket)
        self.bucket = bucket
        self.stochastic = bool(stochastic)
        self.unbiased = self.stochastic
        if self.stochastic:
            contracts = bucket is not None and self.error_bound(bucket) < 1
            self.error_feedback = "optional" if contracts else "forbidden"

    def words(self, size: int, dtype: tf.DType) -> int:
        """Return the words of a maximum per bucket and of the codes, 4 per word."""
        return self._buckets(size) * dtype.size // 4 + math.ceil(size / 4)

    def encode(self, values: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return the words of maxima, then of codes."""
        size = values.shape[0]
        rows = quantize.rows(values, self.bucket or size)
        largest = tf.reduce_max(tf.abs(rows), axis=1, keepdims=True)
        exact = _LEVELS * tf.math.divide_no_nan(rows, largest)
        if self.stochastic:
            levels = quantize.stochastic_round(exact, keys.local())
        else:
            levels = tf.round(exact)
        codes = tf.cast(tf.clip_by_value(levels, -_LEVELS, _LEVELS), tf.int8)
        codes = tf.reshape(codes, [-1])[:size]
        codes = tf.reshape(tf.pad(codes, [[0, -size % 4]]), [-1, 4])
        return tf.concat([to_words(largest), tf.bitcast(codes, tf.int32)], axis=0)

    def decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return `c (max / 127)`."""
        buckets = self._buckets(size)
        split = buckets * dtype.size // 4
        largest = from_words(words[:split], dtype, [buckets, 1])
        codes = tf.reshape(tf.bitcast(words[split:], tf.int8), [-1])[:size]
        levels = quantize.rows(tf.cast(codes, dtype), self.bucket or size)
        # Graphs rewrite a division by a constant to this, so eager code does the same.
        return tf.reshape(levels * (largest * (1 / _LEVELS)), [-1])[:size]

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method, to the nearest or stochastic."""
        size = math.prod(shape)
        name = self.name + (", stochastic" if self.stochastic else "")
        return NativeMethod(
            name, NativeMethod.in_halves(min(size, self.bucket or size))
        )

    def error_bound(self, size: int) -> float:
        """Return the bound for buckets of d entries.

        Errors are at most half a step, or the entry itself. To the nearest level: the
        smaller of `d / (4 127^2)` and `1 - 1/d`, as the largest entry is exact.
        Stochastic: the smaller of `d / (4 127^2)` and `sqrt(d) / 127`.
        """
        d = min(size, self.bucket or size)
        by_step = d / (4 * _LEVELS**2)
        return min(by_step, math.sqrt(d) / _LEVELS if self.stochastic else 1 - 1 / d)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"bucket": self.bucket, "stochastic": self.stochastic}

    def _buckets(self, size: int) -> int:
        return math.ceil(size / (self.bucket or size))
