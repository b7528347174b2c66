"""Sparse binary compression: the larger of two signs' entries, as one value."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import arguments
from tf_dgc.codecs import value_types
from tf_dgc.codecs.checks import BufferCheck
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import NativeMethod, Sparsifier
from tf_dgc.compressors.common import capacity as slots
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent


@keras.saving.register_keras_serializable(package="tf_dgc")
class SBC(Sparsifier):
    """Sends either the k most positive or the k most negative entries, as their mean.

    Sattler et al., algorithm 2: mu+ and mu- are the means of the k largest entries of
    the tensor and of its negative. The side with the larger mean is sent, every entry
    as that mean; all other entries are 0. So all values together take 32 bits and no
    signs. The rest stays in the residual (their equation for R).

    If fewer than k entries are above 0, the paper's mu+ includes entries of the other
    sign, and sends these with the wrong sign. Here the side has only the entries above
    0, in a payload of the same size.

    Positions: the paper's Golomb code takes `b + 1 / (1 - (1 - p)**(2**b))` bits each
    on average, `b = 1 + floor(log2(log(phi - 1) / log(1 - p)))`, with phi the golden
    ratio: 11.5 for the share `p = 1 - sparsity` of 0.1 %, 8.1 for 1 %. Elias-Fano,
    whose length does not depend on the positions, takes 12.0 and 8.6.

    The paper combines this with communication delay (several local steps between
    exchanges), for which see `LocalOptimizer`. Its SBC(1), with `p = 0.001` and no
    delay, is the default.

    Args:
        sparsity: share of entries not sent, in [0, 1).
    """

    name = "sbc"
    reference = "Sattler et al., Sparse binary compression, IJCNN 2019"

    def __init__(self, sparsity: float = 0.999):
        self.sparsity = arguments.check_sparsity(sparsity)

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of k positions and of one float32."""
        del dtype
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        return 4 * (slots.position_words(size, k) + 1)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Select the side, and gather."""
        del state
        values = tf.reshape(values, [-1])
        size, dtype = values.shape[0], values.dtype
        k = num_sent(size, self.sparsity)
        positions, mean = _larger_side(values, k, keys)
        coded = tf.bitcast(value_types.round_to(mean, tf.float32), tf.int32)[tf.newaxis]

        def decode(words: tf.Tensor) -> tuple[tf.Tensor, list[BufferCheck]]:
            means = tf.cast(tf.bitcast(words, tf.float32), dtype)
            return tf.repeat(means, k, axis=1), []

        return (yield from slots.exchange_coded(positions, size, coded, decode))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        k = num_sent(math.prod(shape), self.sparsity)
        return NativeMethod(self.name, NativeMethod.in_halves(k))

    def error_bound(self, size: int) -> float:
        """Return 1, as a payload is a projection of the tensor."""
        del size
        return 1.0

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"sparsity": self.sparsity}


def _larger_side(
    values: tf.Tensor, k: int, keys: RandomKeys
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the positions of the larger side, int32 `[k]`, and its mean, float64."""
    positions, mean = _side(tf.nn.relu(values), k, keys)
    negative_positions, negative_mean = _side(tf.nn.relu(-values), k, keys)
    is_positive = mean >= negative_mean
    return (
        tf.where(is_positive, positions, negative_positions),
        tf.where(is_positive, mean, -negative_mean),
    )


def _side(values: tf.Tensor, k: int, keys: RandomKeys) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the positions of the k largest above 0, and their mean; 0 without any."""
    positions = slots.select(values, values > 0, k, keys)
    selected = tf.cast(slots.values_at(values, positions), tf.float64)
    count = tf.math.count_nonzero(selected, dtype=tf.float64)
    return positions, tf.reduce_sum(selected) / tf.maximum(count, 1.0)
