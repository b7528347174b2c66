"""Sampled threshold: about the k largest entries, without sorting all of them."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import arguments
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import Compressor, NativeMethod
from tf_dgc.compressors.common import capacity as slots
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent

# Of the k largest entries, about so many are in a sample, or it would say little: the
# number that exceeds the threshold has a standard deviation of a quarter of k.
_EXPECTED = 16


@keras.saving.register_keras_serializable(package="tf_dgc")
class SampledThreshold(Compressor):
    """Sends at most k entries above a threshold that a random sample suggests.

    Lin et al., section 5 (sampling and hierarchical selection): the threshold is the
    magnitude that the share `k / n` of a sample reaches. If more than k entries of the
    tensor reach it, a second selection among these keeps the k largest, and k is
    exact. If fewer do, fewer are sent, in a payload of the same size. Every worker
    draws a sample of its own, anew in each step and with replacement.

    The paper samples 0.1 to 1 % of the gradient. Small tensors need more: a sample is
    never so small that fewer than 16 of its entries are to be expected above the
    threshold, and when that takes all of the tensor, the k largest are chosen exactly.

    Args:
        sparsity: share of entries not sent, in [0, 1).
        sample: share of the entries that is looked at, in (0, 1].
        value_dtype: type of the values on the wire: None for the type of the residual,
            "float32", "bfloat16" or "float16".
    """

    name = "sampled_threshold"
    kind = "sparsification"
    reference = "Lin et al., Deep gradient compression, ICLR 2018"

    def __init__(
        self,
        sparsity: float = 0.999,
        sample: float = 0.01,
        value_dtype: str | None = None,
    ):
        slots.check_value_dtype(value_dtype)
        self.sparsity = arguments.check_sparsity(sparsity)
        self.sample = slots.check_share("sample", sample)
        self.value_dtype = value_dtype

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of k positions and values."""
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        return 4 * slots.num_words(size, k, self.value_dtype or dtype.name)

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Sample, compare, and gather."""
        del state
        values = tf.reshape(values, [-1])
        magnitudes = tf.abs(values)
        k = num_sent(values.shape[0], self.sparsity)
        threshold = self._threshold(magnitudes, k, keys)
        wanted = (magnitudes >= threshold) & (values != 0)
        positions = slots.select(magnitudes, wanted, k, keys)
        value_dtype = self.value_dtype or values.dtype.name
        return (yield from slots.exchange(values, positions, value_dtype))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        count, rank = self._sample(size, k)
        sampled = [*NativeMethod.in_halves(count), *NativeMethod.in_halves(rank)]
        return NativeMethod(
            self.name, [*sparse.native_parameters(k, self.value_dtype), *sampled]
        )

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "sparsity": self.sparsity,
            "sample": self.sample,
            "value_dtype": self.value_dtype,
        }

    def _sample(self, size: int, k: int) -> tuple[int, int]:
        """Return the entries of the sample, 0 for all of the tensor, and the rank."""
        count = max(math.ceil(self.sample * size), math.ceil(_EXPECTED * size / k))
        return (0, k) if count >= size else (count, max(1, round(count * k / size)))

    def _threshold(self, magnitudes: tf.Tensor, k: int, keys: RandomKeys) -> tf.Tensor:
        size = magnitudes.shape[0]
        count, rank = self._sample(size, k)
        if count == 0:
            return tf.math.top_k(magnitudes, k, sorted=True).values[-1]
        chosen = tf.random.stateless_uniform(
            [count], keys.local(), maxval=size, dtype=tf.int32
        )
        return tf.math.top_k(tf.gather(magnitudes, chosen), rank).values[-1]
