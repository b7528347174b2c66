"""Natural compression: stochastic rounding to powers of two."""

import keras
import tensorflow as tf

from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import OneRound
from tf_dgc.compressors.random_keys import RandomKeys

_MANTISSA_BITS = {tf.float32: 23, tf.float64: 52}
_EXPONENT_BITS = {tf.float32: 8, tf.float64: 11}


@keras.saving.register_keras_serializable(package="tf_dgc")
class Natural(OneRound, Quantizer):
    """Rounds stochastically to a neighboring power of two, unbiased: 9 bits.

    Horvath et al.'s C_nat: for `2^a <= |t| <= 2^(a+1)` it is `sign(t) 2^a` with
    probability `(2^(a+1) - |t|) / 2^a`, else `sign(t) 2^(a+1)`. In binary floating
    point: drop the mantissa, and increment the exponent with the probability that the
    mantissa states. `E|C(t) - t|^2 <= t^2 / 8` for any size of tensor, so error
    feedback is possible.

    A payload has a sign and an exponent per entry: 9 bits for float32, 12 for float64.
    Magnitudes above the largest power of two become that power.
    """

    name = "natural"
    reference = "Horvath et al., Natural compression, 2019"
    unbiased = True
    error_feedback = "optional"

    def words(self, size: int, dtype: tf.DType) -> int:
        """Return the words of a sign and an exponent per entry."""
        return quantize.num_words(size, 1 + _EXPONENT_BITS[dtype])

    def encode(self, values: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return a sign and a biased exponent per entry."""
        width, dropped = _EXPONENT_BITS[values.dtype], _MANTISSA_BITS[values.dtype]
        integer = tf.int64 if values.dtype == tf.float64 else tf.int32
        magnitudes = tf.bitcast(tf.abs(values), integer)
        # Added to the mantissa, it carries into the exponent with exactly the right
        # probability, also for denormal numbers and 0.
        chance = tf.random.stateless_uniform(
            values.shape, keys.local(), maxval=2**dropped, dtype=integer
        )
        exponents = tf.bitwise.right_shift(
            magnitudes + chance, tf.constant(dropped, integer)
        )
        largest = 2**width - 2  # one more is infinity
        exponents = tf.cast(tf.minimum(exponents, largest), tf.int32)
        negative = tf.cast(values < 0, tf.int32)
        return quantize.pack(exponents + negative * 2**width, width + 1)

    def decode(self, words: tf.Tensor, size: int, dtype: tf.DType) -> tf.Tensor:
        """Return powers of two."""
        width, dropped = _EXPONENT_BITS[dtype], _MANTISSA_BITS[dtype]
        codes = quantize.unpack(words, width + 1, size)
        integer = tf.int64 if dtype == tf.float64 else tf.int32
        exponents = tf.cast(tf.bitwise.bitwise_and(codes, 2**width - 1), integer)
        powers = tf.bitcast(
            tf.bitwise.left_shift(exponents, tf.constant(dropped, integer)), dtype
        )
        return tf.where(codes >= 2**width, -powers, powers)

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        del shape
        return NativeMethod(self.name)

    def error_bound(self, size: int) -> float:
        """Return 1/8."""
        del size
        return 1 / 8
