"""Sampled threshold: about the k largest entries, without sorting all of them."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import arguments
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import NativeMethod, Sparsifier
from tf_dgc.compressors.common import capacity as slots
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent

# Expected number of the k largest entries in a sample. The number of entries above the
# threshold then has a standard deviation of k / 4.
_EXPECTED = 16


@keras.saving.register_keras_serializable(package="tf_dgc")
class SampledThreshold(Sparsifier):
    """Sends at most k entries above a threshold that a random sample determines.

    Lin et al., section 5 (sampling and hierarchical selection): the threshold is the
    magnitude that the share `k / n` of a sample reaches. If more than k entries of the
    tensor reach it, a second selection among these keeps exactly the k largest. If
    fewer do, fewer are sent, in a payload of the same size. Every worker draws its own
    sample in each step, with replacement.

    The paper samples 0.1 to 1 % of the gradient. Small tensors need more: a sample is
    so large that at least 16 of its entries are expected above the threshold. If that
    takes the whole tensor, the k largest entries are selected exactly.

    Args:
        sparsity: share of entries not sent, in [0, 1).
        sample: share of entries in the sample, in (0, 1].
        value_dtype: type of the values on the wire: None for the type of the residual,
            "float32", "bfloat16" or "float16".
    """

    name = "sampled_threshold"
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
        """Return the bytes of k positions and values."""
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        return 4 * slots.num_words(size, k, self.value_dtype or dtype.name)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Sample, compare, and gather."""
        del state
        values = tf.reshape(values, [-1])
        magnitudes = tf.abs(values)
        k = num_sent(values.shape[0], self.sparsity)
        threshold = self._threshold(magnitudes, k, keys)
        mask = (magnitudes >= threshold) & (values != 0)
        positions = slots.select(magnitudes, mask, k, keys)
        value_dtype = self.value_dtype or values.dtype.name
        return (yield from slots.send_entries(values, positions, value_dtype))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        count, rank = self._sample(size, k)
        parameters = [
            *sparse.native_parameters(k, self.value_dtype),
            *NativeMethod.in_halves(count),
            *NativeMethod.in_halves(rank),
        ]
        return NativeMethod(self.name, parameters)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "sparsity": self.sparsity,
            "sample": self.sample,
            "value_dtype": self.value_dtype,
        }

    def _sample(self, size: int, k: int) -> tuple[int, int]:
        """Return the sample's entries, 0 for the whole tensor, and the k-th's rank."""
        count = max(math.ceil(self.sample * size), math.ceil(_EXPECTED * size / k))
        return (0, k) if count >= size else (count, max(1, round(count * k / size)))

    def _threshold(self, magnitudes: tf.Tensor, k: int, keys: RandomKeys) -> tf.Tensor:
        size = magnitudes.shape[0]
        count, rank = self._sample(size, k)
        if count == 0:
            return tf.math.top_k(magnitudes, k, sorted=True).values[-1]
        positions = tf.random.stateless_uniform(
            [count], keys.local(), maxval=size, dtype=tf.int32
        )
        return tf.math.top_k(tf.gather(magnitudes, positions), rank).values[-1]
