"""Variance-based compression: what is certain is sent, what is noise waits."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.codecs import value_types
from tf_dgc.codecs.checks import BufferCheck
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import Compressor, NativeMethod, StateSpec
from tf_dgc.compressors.common import capacity as slots
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.random_keys import RandomKeys

_BITS = 4  # a sign, and how many powers of two below the largest


@keras.saving.register_keras_serializable(package="tf_dgc")
class VarianceBased(Compressor):
    """Sends an entry when its sum is large against the sum of its squares.

    Tsuzuku et al., algorithm 1: with r the sum of an entry's gradients since it was
    last sent, and v the sum of their squares, it is sent when `r**2 > alpha * v`; both
    begin at 0 again. Else v decays by `zeta`, so that no entry waits for ever.

    In the paper both sums are over the samples of every batch, v being the sum of
    `(gradient of one sample / batch size)**2`. An optimizer sees only the gradient g
    of the step, the sum of these. So the step takes the place of the sample here:
    `v += g**2`, and the criterion is the paper's (its equation 4) for samples as large
    as a batch. Where noise dominates, the two agree in expectation: squares of a sum of
    independent terms with mean 0 are on average the sum of their squares. Where it
    does not, v is larger here, up to the batch size times, and an entry waits for more
    steps: at least `alpha` of them, so never is one sent in the first.

    Values (section 4.2) are rounded to the nearest power of two, but not above the
    largest one not above the tensor's largest; that one is sent, and for each entry a
    sign and 3 bits for how many powers it is below. What is more than 7 below is not
    sent. Positions take about `2 + log2(1 + 1 / capacity)` bits each, where the paper's
    word of 32 bits has 28 for them. What rounding loses, which the paper drops, stays
    in the residual, and counts as a first gradient: v begins at its square, or the
    entry would look certain and go out again at once. The payload holds
    `capacity * n` entries, the largest if there are more; free places are sent too.

    State: `deviation`, the square root of v, as squares of gradients would underflow.

    Args:
        alpha: measure of how certain an entry must be, above 0; 1 to 2 in the paper.
        zeta: decay of v per step, in (0, 1].
        capacity: share of the entries that fit into a payload, in (0, 1].
    """

    name = "variance_based"
    kind = "sparsification"
    reference = "Tsuzuku et al., Variance-based compression, ICLR 2018 workshop"
    error_feedback = "required"
    reads_residual = True

    def __init__(self, alpha: float = 1.0, zeta: float = 0.999, capacity: float = 0.01):
        self.alpha = check_number("alpha", alpha, "(0, inf)")
        self.zeta = check_number("zeta", zeta, "(0, 1]")
        self.capacity = slots.check_share("capacity", capacity)

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return the root of the sum of squares."""
        return {"deviation": StateSpec(shape)}

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of as many positions and codes as fit, and of an exponent."""
        del dtype
        size = math.prod(shape)
        capacity = slots.num_slots(size, self.capacity)
        codes = 1 + quantize.num_words(capacity, _BITS)
        return 4 * (slots.position_words(size, capacity) + codes)

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Compare, round and gather."""
        shape, dtype = values.shape, values.dtype
        gradient = tf.reshape(values - state["residual"], [-1])
        values = tf.reshape(values, [-1])
        capacity = slots.num_slots(values.shape[0], self.capacity)
        deviation = _hypotenuse(tf.reshape(state["deviation"], [-1]), gradient)
        certain = tf.abs(values) > math.sqrt(self.alpha) * deviation
        largest = tf.reduce_max(tf.where(certain, tf.abs(values), 0))
        top, below = _powers(values, largest)
        positions = slots.select(tf.abs(values), certain & (below < 8), capacity, keys)
        codes = slots.values_at(below + 8 * tf.cast(values < 0, tf.int32), positions)
        coded = tf.concat([top[tf.newaxis], quantize.pack(codes, _BITS)], axis=0)

        def decode(words: tf.Tensor) -> tuple[tf.Tensor, list[BufferCheck]]:
            return _decode(words, capacity, dtype)

        result = yield from slots.exchange_coded(
            positions, values.shape[0], coded, decode
        )
        left, waits = tf.abs(values - result.sent), math.sqrt(self.zeta) * deviation
        after = tf.where(result.sent != 0, left, waits)
        return result._replace(state={"deviation": tf.reshape(after, shape)})

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        capacity = slots.num_slots(math.prod(shape), self.capacity)
        factors = [math.sqrt(self.alpha), math.sqrt(self.zeta)]
        return NativeMethod(
            self.name,
            [*NativeMethod.in_halves(capacity), *factors],
            list(self.state(shape)),
        )

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"alpha": self.alpha, "zeta": self.zeta, "capacity": self.capacity}


def _hypotenuse(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return `sqrt(a**2 + b**2)`, the largest number if larger.

    Without squares of large or small numbers.
    """
    longer = tf.maximum(tf.abs(a), tf.abs(b))
    shorter = tf.minimum(tf.abs(a), tf.abs(b))
    both = longer * tf.sqrt(1 + tf.square(tf.math.divide_no_nan(shorter, longer)))
    return tf.minimum(both, a.dtype.max)


def _powers(values: tf.Tensor, largest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the exponent of the largest, and how far below each entry is, int32.

    Exponents are the bits of float32 that hold them: 1 to 254, or 0 for what is too
    small for a power of two of its own.
    """
    top = tf.bitwise.right_shift(_bits(largest), 23)
    # Half of the last mantissa bits carries into the exponent from 1.5 on.
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
