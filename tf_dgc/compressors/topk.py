"""Top-k: the k entries of largest magnitude, always exactly k.

Lin et al., ICLR 2018, section 3.1 (gradient sparsification).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc._internals import tracing
from tf_dgc.arguments import show
from tf_dgc.codecs import value_types
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import Compressor, NativeMethod, Sparsifier
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.largest import top_k, top_k_of
from tf_dgc.compressors.random_keys import RandomKeys, tie_break_key

# `1 - 0.999` is slightly above 0.001; without this, 2 of 1000 entries would be sent.
_ROUNDING = 1e-6


@keras.saving.register_keras_serializable(package="tf_dgc")
class TopK(Sparsifier):
    """Sends the k entries of largest magnitude, `k = max(1, ceil((1 - sparsity) * n))`.

    Lin et al., section 3.1; Stich et al., definition 2.1 (`top_k`). Positions take
    about `2 + log2(n / k)` bits each; `value_dtype` determines the bits of values.

    With "sign", if fewer than k entries are nonzero, zeros are sent as the magnitude,
    too, and the residual compensates for it in later steps: weights without a gradient
    fluctuate around their values.

    Args:
        sparsity: share of entries not sent, in [0, 1); or a schedule of the iteration.
        value_dtype: type of the values on the wire: None for the type of the residual,
            or one of `tf_dgc.codecs.value_types.CHOICES`.
    """

    name = "top_k"
    reference = "Lin et al., Deep gradient compression, ICLR 2018"
    limits_magnitudes = True

    def __init__(
        self,
        sparsity: float | Callable[..., Any] = 0.999,
        value_dtype: str | None = None,
    ):
        self.sparsity = schedules.get_sparsity(sparsity)
        value_types.check_choice(value_dtype)
        self.value_dtype = value_dtype

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int | None:
        """Return the bytes of k positions and values; None with a schedule."""
        if callable(self.sparsity):
            return None
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        return 4 * sparse.num_words(size, k, self.value_dtype or dtype.name)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Select and gather."""
        del state
        values = tf.reshape(values, [-1])
        size = values.shape[0]
        k = num_sent(size, schedules.sparsity_at(self.sparsity, keys.step))
        offset = tie_offset(size, keys)
        value_dtype = self.value_dtype or values.dtype.name
        if tf.is_tensor(k) and tracing.in_xla_context():
            return (yield from self._exchange_in_xla(values, k, keys, value_dtype))
        positions, _ = top_k(values, k, offset)
        return (
            yield from sparse.send_entries(
                values, positions, k, value_dtype, keys.max_magnitude
            )
        )

    def _exchange_in_xla(
        self, values: tf.Tensor, k: tf.Tensor, keys: RandomKeys, value_dtype: str
    ) -> Aggregation:
        """Exchange a scheduled k in static shapes.

        The payload has room for the schedule's largest k; unused room is sent as 0.
        """
        size, dtype = values.shape[0], values.dtype
        capacity = num_sent(size, schedules.smallest_sparsity(self.sparsity))
        _check_xla_value_dtype(value_dtype)
        positions, is_sent = top_k_of(values, capacity, k, tie_offset(size, keys))
        indices = positions[:, tf.newaxis]
        sent = tf.where(is_sent, tf.gather(values, positions), 0)
        sent = value_types.bound(sent, keys.max_magnitude)
        if capacity == size:
            # A step with k = n sends exact values, so the payload must be able to.
            coded = value_types.encode_values(sent, value_dtype)[tf.newaxis]
            rounded = value_types.decode_values(coded, value_dtype, capacity, dtype)[0]
            sent = tf.where(tf.equal(k, size), sent, rounded)
            value_dtype = dtype.name
        values = tf.scatter_nd(indices, sent, [size])
        result = yield from sparse.send_entries(
            values, positions, capacity, value_dtype
        )
        mask = tf.zeros([size], tf.bool)
        chosen = tf.tensor_scatter_nd_update(mask, indices, is_sent)
        return result._replace(entries=k, chosen=chosen)

    def native(self, shape: tuple[int, ...]) -> NativeMethod | None:
        """Return the native method; None with a schedule."""
        if callable(self.sparsity):
            return None
        k = num_sent(math.prod(shape), self.sparsity)
        return NativeMethod(self.name, sparse.native_parameters(k, self.value_dtype))

    def error_bound(self, size: int) -> float | None:
        """Return `1 - k/n` (Stich et al., lemma A.1); None if values are rounded."""
        if callable(self.sparsity) or self.value_dtype is not None:
            return None
        return 1 - num_sent(size, self.sparsity) / size

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        sparsity = schedules.sparsity_config(self.sparsity)
        return {"sparsity": sparsity, "value_dtype": self.value_dtype}


def is_top_k(compressor: Compressor) -> TypeGuard[TopK]:
    """Return whether a method is `TopK` itself, which has a step of its own.

    A subclass may send other entries, so it takes the steps of the other methods.
    """
    return type(compressor) is TopK


def num_sent(size: int, sparsity: float | tf.Tensor) -> int | tf.Tensor:
    """Return `k = max(1, ceil((1 - sparsity) * size))`.

    Args:
        size: number of entries of the tensor, at least 1.
        sparsity: share not sent, in [0, 1): a float, or a scalar float64 tensor.

    Returns:
        An int, or a scalar int32 tensor if `sparsity` is one.
    """
    if isinstance(sparsity, float | int):
        return max(1, math.ceil((1.0 - sparsity) * size - _ROUNDING))
    k = tf.math.ceil((1.0 - sparsity) * size - _ROUNDING)
    return tf.maximum(1, tf.cast(k, tf.int32))


def _check_xla_value_dtype(value_dtype: str) -> None:
    """Raise `ValueError` if unused room would change the other values' codes."""
    if value_types.is_shared(value_dtype):
        raise ValueError(
            "XLA compiles only shapes that are known while tracing, and with a "
            "scheduled sparsity the magnitude or scale that values share by "
            f"`value_dtype={show(value_dtype)}` is of a number of entries that is not. "
            "Pass `jit_compile=False` to `model.compile`, or choose a constant "
            "sparsity or another `value_dtype`."
        )


def tie_offset(size: int, keys: RandomKeys) -> tf.Tensor:
    """Return the position from which a tensor's ties are broken.

    Scalar int32, uniform in [0, size), the same on all workers.
    """
    return tf.cast(keys.tie() * size, tf.int32)


def tie_offsets(
    sizes: Sequence[int], seed: int, iteration: tf.Tensor
) -> list[tf.Tensor]:
    """Return the position from which ties are broken, for each tensor of a model.

    Args:
        sizes: number of entries of each tensor of the model.
        seed: seed of the optimizer.
        iteration: number of the step, a scalar integer tensor.

    Returns:
        Scalar int32 tensors, uniform in [0, size).
    """
    ties = tie_break_key(seed, iteration, len(sizes))
    offsets = tf.cast(ties * tf.constant(sizes, tf.float64), tf.int32)
    unstacked: list[tf.Tensor] = tf.unstack(offsets)
    return unstacked
