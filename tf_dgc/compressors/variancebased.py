"""Variance-based compression: the entries whose sum is large relative to its noise."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.codecs import value_types
from tf_dgc.codecs.checks import BufferCheck
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import NativeMethod, Sparsifier, StateSpec
from tf_dgc.compressors.common import capacity as slots
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.random_keys import RandomKeys

_BITS = 4  # a sign, and 3 bits for the powers of two below the largest


@keras.saving.register_keras_serializable(package="tf_dgc")
class VarianceBased(Sparsifier):
    """Sends an entry when its sum is large relative to the sum of its squares.

    Tsuzuku et al., algorithm 1: with r the sum of an entry's gradients since it was
    last sent, and v the sum of their squares, it is sent when `r**2 > alpha * v`, and
    both restart at 0. Otherwise v decays by `zeta`, so that no entry waits forever.

    In the paper both sums are over the samples of every batch, and v is the sum of
    `(gradient of one sample / batch size)**2`. An optimizer has only the gradient g of
    the step, so here `v += g**2`: the paper's criterion (its equation 4) with a batch
    as one sample. If noise dominates, the two agree on average, as the expected square
    of a sum of independent terms with mean 0 is the sum of their squares. Otherwise v
    is larger here, up to the batch size times, and an entry waits for more steps: at
    least `alpha`, so that none is sent in the first step.

    Values (section 4.2) are rounded to the nearest power of two, up to the largest
    power that does not exceed the tensor's largest entry. A payload has that power, and
    for each entry a sign and 3 bits for the number of powers below it. Entries more
    than 7 powers below are not sent. Positions take about `2 + log2(1 + 1 / capacity)`
    bits each; the paper's 32-bit words have 28 for them. The payload has
    `capacity * n` slots and a fixed size; if more entries qualify, the largest are
    sent. The paper drops rounding errors. Here they stay in the residual and count as
    first gradient: v restarts at their square, or the entry would look certain and be
    sent again immediately.

    State: `deviation`, the square root of v, as squares of gradients would underflow.

    Args:
        alpha: certainty that an entry must have, above 0; 1 to 2 in the paper.
        zeta: decay of v per step, in (0, 1].
        capacity: share of the entries that fit into a payload, in (0, 1].
    """

    name = "variance_based"
    reference = "Tsuzuku et al., Variance-based compression, ICLR 2018 workshop"
    error_feedback = "required"
    reads_residual = True

    def __init__(self, alpha: float = 1.0, zeta: float = 0.999, capacity: float = 0.01):
        self.alpha = check_number("alpha", alpha, "(0, inf)")
        self.zeta = check_number("zeta", zeta, "(0, 1]")
        self.capacity = slots.check_share("capacity", capacity)

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return the square root of the sum of squares."""
        return {"deviation": StateSpec(shape)}

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of a position and a code per slot, and of an exponent."""
        del dtype
        size = math.prod(shape)
        capacity = slots.num_slots(size, self.capacity)
        codes = 1 + quantize.num_words(capacity, _BITS)
        return 4 * (slots.position_words(size, capacity) + codes)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Compare, round and gather."""
        shape, dtype = values.shape, values.dtype
        gradient = tf.reshape(values - state["residual"], [-1])
        values = tf.reshape(values, [-1])
        capacity = slots.num_slots(values.shape[0], self.capacity)
        deviation = _hypotenuse(tf.reshape(state["deviation"], [-1]), gradient)
        magnitudes = tf.abs(values)
        is_certain = magnitudes > math.sqrt(self.alpha) * deviation
        largest = tf.reduce_max(tf.where(is_certain, magnitudes, 0))
        top, below = _powers(values, largest)
        positions = slots.select(magnitudes, is_certain & (below < 8), capacity, keys)
        codes = slots.values_at(below + 8 * tf.cast(values < 0, tf.int32), positions)
        coded = tf.concat([top[tf.newaxis], quantize.pack(codes, _BITS)], axis=0)

        def decode(words: tf.Tensor) -> tuple[tf.Tensor, list[BufferCheck]]:
            return _decode(words, capacity, dtype)

        result = yield from slots.exchange_coded(
            positions, values.shape[0], coded, decode
        )
        error = tf.abs(values - result.sent)
        decayed = math.sqrt(self.zeta) * deviation
        deviation = tf.where(result.sent != 0, error, decayed)
        return result._replace(state={"deviation": tf.reshape(deviation, shape)})

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        capacity = slots.num_slots(math.prod(shape), self.capacity)
        parameters = [
            *NativeMethod.in_halves(capacity),
            math.sqrt(self.alpha),
            math.sqrt(self.zeta),
        ]
        return NativeMethod(self.name, parameters, ["deviation"])

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"alpha": self.alpha, "zeta": self.zeta, "capacity": self.capacity}


def _hypotenuse(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return `sqrt(a**2 + b**2)`, at most the largest number.

    Avoids squares of large or small numbers.
    """
    longer = tf.maximum(tf.abs(a), tf.abs(b))
    shorter = tf.minimum(tf.abs(a), tf.abs(b))
    length = longer * tf.sqrt(1 + tf.square(tf.math.divide_no_nan(shorter, longer)))
    return tf.minimum(length, a.dtype.max)


def _powers(values: tf.Tensor, largest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the exponent of the largest entry, and each entry's distance, int32.

    Exponents are the biased ones of float32: 1 to 254, or 0 for denormal numbers.
    """
    top = tf.bitwise.right_shift(_bits(largest), 23)
    # Adding half of the mantissa's range carries into the exponent from 1.5 on.
    nearest = tf.bitwise.right_shift(_bits(tf.abs(values)) + 2**22, 23)
    return top, top - tf.minimum(nearest, top)


def _bits(values: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(value_types.round_to(values, tf.float32), tf.int32)


def _decode(
    words: tf.Tensor, capacity: int, dtype: tf.DType
) -> tuple[tf.Tensor, list[BufferCheck]]:
    """Return values, `[N, capacity]`, of the words of all workers."""
    tops, rest = words[:, :1], words[:, 1:]
    codes = tf.stack(
        [quantize.unpack(row, _BITS, capacity) for row in tf.unstack(rest)]
    )
    exponents = tf.maximum(tops - tf.math.floormod(codes, 8), 0)
    powers = tf.bitcast(tf.bitwise.left_shift(exponents, 23), tf.float32)
    values = tf.cast(tf.where(codes >= 8, -powers, powers), dtype)
    wrong = tf.cast((tops[:, 0] < 0) | (tops[:, 0] > 254), tf.int32)
    return values, [BufferCheck("exponents that are none", wrong, 0)]
