"""QSGD: stochastic rounding to a few levels of each bucket's norm."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.arguments import check_whole, show
from tf_dgc.codecs import elias_gamma
from tf_dgc.codecs.bits import to_words
from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import OneRound, from_words
from tf_dgc.compressors.random_keys import RandomKeys

_OVERFLOW_PROBABILITY = 1e-12  # upper bound, that a tensor's code does not fit


@keras.saving.register_keras_serializable(package="tf_dgc")
class QSGD(OneRound, Quantizer):
    """Rounds each entry stochastically to a multiple of `norm / levels`, unbiased.

    Alistarh et al., section 3.1: in every bucket, `Q(v_i) = |v|_2 sgn(v_i) xi_i`, where
    xi_i is one of the two multiples of `1/s` next to `|v_i| / |v|_2`, with
    probabilities such that the expected value is right. For a bucket of d entries
    `E|Q(v) - v|^2 <= min(d/s^2, sqrt(d)/s) |v|^2` (lemma 3.1).

    A payload has a norm per bucket, and the levels in one of two codings:

    - "fixed": `ceil(log2(2 s + 1))` bits each, 4 by default.
    - "elias": gaps, signs and magnitudes of nonzero levels as in the paper (section
      3.1), with the gamma code, which is shorter for small numbers than its recursive
      code. The length varies, but payloads have a fixed length. There is room for the
      expected length of the worst input (theorem 3.2 with the constants of this code: 2
      bits per entry by default, of which gradients fill about 1.4) and a margin that is
      exceeded once in 10^12 tensors. Then the last levels that do not fit become 0 and
      count as not sent. Levels can exceed that room also if the norm of a bucket
      exceeds the largest number of its type, as with entries near 1e38 in float32.

    Error feedback is allowed if the bound is below 1; otherwise it would diverge.

    Args:
        levels: number s of magnitudes above 0; 1 is ternary.
        bucket: entries that share a norm (section 4: 512 for 4 bits); a smaller tensor
            is one bucket.
        coding: coding of the levels: "elias", "fixed", or None for the shorter one for
            a tensor's size, which is "elias" with the defaults and 100 entries or more.
            Within XLA, where nothing is transferred, it is always "fixed"; the result
            is the same.
    """

    name = "qsgd"
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
        """Return the words of one norm per bucket and of the coded levels."""
        norms = self._buckets(size) * dtype.size // 4
        return norms + (self._elias_words(size) or self._fixed_words(size))

    def encode(self, values: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return the words of norms, then of levels."""
        rows = quantize.rows(values, self.bucket)
        norms = quantize.norms(rows)
        # The share of a bucket's only entry may round to above 1.
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
        # Graphs rewrite a division by a constant to this, so eager code does the same.
        return tf.reshape(levels * (norms * (1 / self.levels)), [-1])[:size]

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method of the coding."""
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
        """Return the words of levels in coding "elias"; None for "fixed".

        The magnitudes of a bucket of d entries, s |v_i| / |v|, add up to at most
        `s sqrt(d)`. Rounded independently by less than 1, their sum exceeds that by t
        with probability `exp(-2 t^2 / n)` at most (Hoeffding).
        """
        if self.coding == "fixed" or tracing.in_xla_context():
            return None
        whole, rest = divmod(size, self.bucket)
        expected = self.levels * (whole * math.sqrt(self.bucket) + math.sqrt(rest))
        margin = math.sqrt(size * math.log(1 / _OVERFLOW_PROBABILITY) / 2)
        total = min(expected + margin, self.levels * size)
        words = elias_gamma.num_words(elias_gamma.max_bits(size, total))
        if self.coding is None and words >= self._fixed_words(size):
            return None
        return words
