"""QSGD: stochastic rounding to a few levels of each bucket's norm."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.compressors import quantize
from tf_dgc.compressors.base import Draw
from tf_dgc.compressors.one_round import OneRound, from_words, to_words


@keras.saving.register_keras_serializable(package="tf_dgc")
class QSGD(OneRound):
    """Rounds each entry to a multiple of `norm / levels`, by chance, without bias.

    Alistarh et al., section 3.1: in every bucket, `Q(v_i) = |v|_2 sgn(v_i) xi_i`, where
    xi_i is one of the two multiples of `1/s` next to `|v_i| / |v|_2`, with
    probabilities that make the expectation right. For a bucket of d entries
    `E|Q(v) - v|^2 <= min(d/s^2, sqrt(d)/s) |v|^2` (lemma 3.1).

    Levels are packed into `ceil(log2(2 s + 1))` bits, 4 by default. The paper's Elias
    code is shorter in expectation when most levels are 0, but its length varies, and
    buffers here have a length that all workers know beforehand.

    Error feedback is allowed where the bound is below 1; else it would diverge.

    Args:
        levels: s, of magnitudes above 0; 1 is ternary.
        bucket: entries that share a norm (section 4: 512 for 4 bits).
    """

    name = "qsgd"
    kind = "quantization"
    reference = "Alistarh et al., QSGD, NeurIPS 2017"
    unbiased = True

    def __init__(self, levels: int = 7, bucket: int = 512):
        for what, value in (("levels", levels), ("bucket", bucket)):
            if isinstance(value, bool) or int(value) != value or value < 1:
                raise ValueError(
                    f"`{what}` must be a whole number, 1 or more. "
                    f"Received: {what}={value!r}"
                )
        if levels >= 2**24:
            raise ValueError(
                "`levels` must be below 2**24, where float32 is exact. "
                f"Received: levels={levels}"
            )
        self.levels = int(levels)
        self.bucket = int(bucket)
        contracts = self.error_bound(self.bucket) < 1
        self.error_feedback = "optional" if contracts else "forbidden"

    def words(self, size: int, dtype: tf.DType) -> int:
        """Return those of one norm per bucket, and of the codes."""
        norms = self._buckets(size) * dtype.size // 4
        return norms + quantize.num_words(size, self._width)

    def encode(self, values: tf.Tensor, draw: Draw) -> tf.Tensor:
        """Return norms, then codes `s + level`."""
        size = values.shape[0]
        rows = self._rows(values)
        # Of what is scaled to 1 first: squares of large numbers overflow.
        largest = tf.reduce_max(tf.abs(rows), axis=1, keepdims=True)
        unit = tf.math.divide_no_nan(rows, largest)
        lengths = tf.norm(unit, axis=1, keepdims=True)
        exact = self.levels * tf.math.divide_no_nan(unit, lengths)
        levels = quantize.stochastic_round(exact, draw.local())
        # A single entry's share can be rounded to above 1.
        levels = tf.clip_by_value(levels, -self.levels, self.levels)
        codes = tf.cast(tf.reshape(levels, [-1])[:size], tf.int32) + self.levels
        norms = tf.minimum(largest, values.dtype.max / lengths) * lengths
        return tf.concat([to_words(norms), quantize.pack(codes, self._width)], axis=0)

    def decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return `norm * level / s`."""
        buckets = self._buckets(size)
        split = buckets * dtype.size // 4
        norms = from_words(words[:split], dtype, [buckets, 1])
        codes = quantize.unpack(words[split:], self._width, size)
        levels = self._rows(tf.cast(codes - self.levels, dtype))
        return tf.reshape(levels * (norms / self.levels), [-1])[:size]

    def error_bound(self, size: int) -> float:
        """Return `min(d/s^2, sqrt(d)/s)` for a bucket of d entries."""
        d = min(size, self.bucket)
        return min(d / self.levels**2, math.sqrt(d) / self.levels)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"levels": self.levels, "bucket": self.bucket}

    @property
    def _width(self) -> int:
        return (2 * self.levels).bit_length()

    def _buckets(self, size: int) -> int:
        return math.ceil(size / self.bucket)

    def _rows(self, values: tf.Tensor) -> tf.Tensor:
        """Return `[buckets, bucket]`, filled up with zeros."""
        size = values.shape[0]
        missing = self._buckets(size) * self.bucket - size
        return tf.reshape(tf.pad(values, [[0, missing]]), [-1, self.bucket])
