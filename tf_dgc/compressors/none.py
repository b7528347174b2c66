"""No compression: the baseline of every method."""

import math

import keras
import tensorflow as tf

from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import Compressor, NativeMethod
from tf_dgc.compressors.common.one_round import send_whole
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class NoCompression(Compressor):
    """Sums whole gradients by all-reduce, as Keras itself does."""

    name = "none"
    kind = "control"
    reference = "all-reduce of the whole gradient"
    aggregation = "sum"
    unbiased = True
    error_feedback = "forbidden"

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of all entries."""
        return dtype.size * math.prod(shape)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Sum."""
        del state, keys
        return (yield from send_whole(values, self.aggregation))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        del shape
        return NativeMethod("whole", [math.inf], (), tf.float32)

    def error_bound(self, size: int) -> float:
        """Return 0."""
        del size
        return 0.0
