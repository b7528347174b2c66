"""QSGD: stochastic rounding to a few levels of each bucket's norm."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.arguments import check_whole, show
from tf_dgc.codecs import elias_gamma
from tf_dgc.compressors.base import NativeMethod, RandomKeys
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import OneRound, from_words, to_words

_OVERFLOWS = 1e-12  # probability that a tensor's code does not fit, at the most


@keras.saving.register_keras_serializable(package="tf_dgc")
class QSGD(OneRound):
    """Rounds each entry to a multiple of `norm / levels`, by chance, without bias.

    Alistarh et al., section 3.1: in every bucket, `Q(v_i) = |v|_2 sgn(v_i) xi_i`, where
    xi_i is one of the two multiples of `1/s` next to `|v_i| / |v|_2`, with
    probabilities that make the expectation right. For a bucket of d entries
    `E|Q(v) - v|^2 <= min(d/s^2, sqrt(d)/s) |v|^2` (lemma 3.1).

    On the wire are a norm per bucket, and the levels in one of two codings. "fixed":
    `ceil(log2(2 s + 1))` bits each, 4 by default. "elias": the paper's (section 3.1),
    gaps, signs and magnitudes of levels that are not 0, with gamma in place of its
    recursive code, which is longer for small numbers. Its length varies, and buffers
    have a length that all workers know beforehand, so there is room for the longest
    that can be expected of any input (as theorem 3.2, with the constants of this code:
    2 bits per entry by default; gradients fill some 1.4), and for more of it than comes
    up once in 10^12 tensors. If it does, the last levels that do not fit are 0, and
    count as not sent. That holds of buckets whose norm is below the largest number of
    the type: of entries near 1e38 in float32 it may not be, every share is then one of
    the largest number instead, and levels add up to more than there is room for.

    Error feedback is allowed where the bound is below 1; else it would diverge.

    Args:
        levels: number s of magnitudes above 0; 1 is ternary.
        bucket: entries that share a norm (section 4: 512 for 4 bits); of a tensor that
            is not longer, all of them.
        coding: code of the levels: "elias", "fixed", or None for the shorter one of a
            tensor's size; that is "elias" with the defaults and 100 entries or more.
            Within XLA, where nothing travels, it is always "fixed": what is sent is the
            same.
    """

    name = "qsgd"
    kind = "quantization"
    reference = "Alistarh et al., QSGD, NeurIPS 2017"
    unbiased = True

    def __init__(self, levels: int = 7, bucket: int = 512, coding: str | None = None):
        self.levels = check_whole("levels", levels)
        self.bucket = check_whole("bucket", bucket)
        if coding not in {None, "elias", "fixed"}:
            raise ValueError(
                '`coding` must be "elias", "fixed", or None for the shorter one. '
                f"Received: coding={show(coding)}"
            )
        if levels >= 2**24:
            raise ValueError(
                "`levels` must be below 2**24, where float32 is exact. "
                f"Received: levels={levels}"
            )
        self.coding = coding
        contracts = self.error_bound(self.bucket) < 1
        self.error_feedback = "optional" if contracts else "forbidden"

    def words(self, size: int, dtype: tf.DType) -> int:
        """Return those of one norm per bucket, and of the coded levels."""
        norms = self._buckets(size) * dtype.size // 4
        return norms + (self._elias_words(size) or self._fixed_words(size))

    def encode(self, values: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return norms, then levels."""
        rows = quantize.rows(values, self.bucket)
        norms = quantize.norms(rows)
        # A single entry's share can be rounded to above 1.
        shares = tf.clip_by_value(tf.math.divide_no_nan(rows, norms), -1, 1)
        levels = quantize.stochastic_round(self.levels * shares, keys.local())
        levels = tf.cast(tf.reshape(levels, [-1])[: values.shape[0]], tf.int32)
        return tf.concat([to_words(norms), self._pack(levels)], axis=0)

    def decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return `level (norm / s)`."""
        buckets = self._buckets(size)
        split = buckets * dtype.size // 4
        norms = from_words(words[:split], dtype, [buckets, 1])
        levels = tf.cast(self._unpack(words[split:], size), dtype)
        levels = quantize.rows(levels, self.bucket)
        # Multiplied, as a division by a constant is what graphs make that of.
        return tf.reshape(levels * (norms * (1 / self.levels)), [-1])[:size]

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method of the coding, with the words of levels by Elias."""
        size = math.prod(shape)
        words = self._elias_words(size) or 0
        coding = "elias" if words else "fixed"
        bucket = NativeMethod.in_halves(min(size, self.bucket))
        parameters = [self.levels, *bucket, *NativeMethod.in_halves(words)]
        return NativeMethod(f"{self.name}, {coding}", parameters)

    def error_bound(self, size: int) -> float:
        """Return `min(d/s^2, sqrt(d)/s)` for a bucket of d entries."""
        d = min(size, self.bucket)
        return min(d / self.levels**2, math.sqrt(d) / self.levels)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"levels": self.levels, "bucket": self.bucket, "coding": self.coding}

    @property
    def _width(self) -> int:
        return (2 * self.levels).bit_length()

    def _buckets(self, size: int) -> int:
        return math.ceil(size / self.bucket)

    def _pack(self, levels: tf.Tensor) -> tf.Tensor:
        words = self._elias_words(levels.shape[0])
        if words:
            return elias_gamma.encode(levels, words)
        return quantize.pack(levels + self.levels, self._width)

    def _unpack(self, words: tf.Tensor, size: int) -> tf.Tensor:
        if self._elias_words(size):
            return elias_gamma.decode(words, size)
        return quantize.unpack(words, self._width, size) - self.levels

    def _fixed_words(self, size: int) -> int:
        return quantize.num_words(size, self._width)

    def _elias_words(self, size: int) -> int | None:
        """Return the words of levels coded by Elias; None if they are not.

        Magnitudes of a bucket of d entries, s |v_i| / |v|, add up to at most
        `s sqrt(d)`. Rounded independently by less than 1, they add up to more than
        that and t with probability `exp(-2 t^2 / n)` at the most (Hoeffding).
        """
        if self.coding == "fixed" or tracing.in_xla_context():
            return None
        whole, rest = divmod(size, self.bucket)
        expected = self.levels * (whole * math.sqrt(self.bucket) + math.sqrt(rest))
        margin = math.sqrt(size * math.log(1 / _OVERFLOWS) / 2)
        total = min(expected + margin, self.levels * size)
        words = elias_gamma.num_words(elias_gamma.max_bits(size, total))
        if self.coding is None and words >= self._fixed_words(size):
            return None
        return words
