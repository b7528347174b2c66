"""Fixed threshold: the entries that reach a magnitude."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number, show
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import NativeMethod, Sparsifier
from tf_dgc.compressors.common import capacity as slots
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class Threshold(Sparsifier):
    """Sends entries whose magnitude is at least a fixed threshold.

    Strom, section 3: an entry is sent when its accumulated value reaches tau, and the
    rest stays in the residual. Strom sends `tau` or `-tau`, 1 bit per entry, as does
    `binary=True`. The default sends the whole entry (as Dryden et al., MLHPC 2016,
    describe the fixed threshold from which they start), so that none of it remains.

    The number of entries varies. The payload has `capacity * n` slots and a fixed size;
    if more entries qualify, the largest are sent. Positions take about
    `2 + log2(1 + 1 / capacity)` bits each, in Strom's paper 31.

    Args:
        threshold: magnitude tau, above 0. It is compared with local gradients, which
            Keras has divided by the number of workers.
        capacity: share of the entries that fit into a payload, in (0, 1].
        binary: whether to send `tau` and `-tau` instead of the entries.
        value_dtype: type of the entries on the wire: None for the type of the residual,
            "float32", "bfloat16" or "float16".
    """

    name = "threshold"
    reference = "Strom, Scalable distributed DNN training, Interspeech 2015"
    homogeneity = None

    def __init__(
        self,
        threshold: float = 1e-3,
        capacity: float = 0.01,
        binary: bool = False,
        value_dtype: str | None = None,
    ):
        self.threshold = check_number("threshold", threshold, "(0, inf)")
        slots.check_value_dtype(value_dtype)
        if binary and value_dtype is not None:
            raise ValueError(
                "With `binary=True` signs are sent; `value_dtype` must be None. "
                f"Received: value_dtype={show(value_dtype)}"
            )
        self.capacity = slots.check_share("capacity", capacity)
        self.binary = bool(binary)
        self.value_dtype = value_dtype

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of a position and a value per slot."""
        size = math.prod(shape)
        capacity = slots.num_slots(size, self.capacity)
        value_dtype = "sign" if self.binary else self.value_dtype or dtype.name
        return 4 * slots.num_words(size, capacity, value_dtype)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Compare, and gather."""
        del state
        values = tf.reshape(values, [-1])
        magnitudes = tf.abs(values)
        capacity = slots.num_slots(values.shape[0], self.capacity)
        mask = magnitudes >= self.threshold
        positions = slots.select(magnitudes, mask, capacity, keys)
        if self.binary:
            tau = tf.constant(self.threshold, values.dtype)
            return (yield from slots.exchange_signs(values, positions, tau))
        value_dtype = self.value_dtype or values.dtype.name
        return (yield from slots.send_entries(values, positions, value_dtype))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        capacity = slots.num_slots(math.prod(shape), self.capacity)
        name = f"{self.name}, binary" if self.binary else self.name
        value_dtype = "sign" if self.binary else self.value_dtype
        parameters = sparse.native_parameters(capacity, value_dtype)
        return NativeMethod(name, [*parameters, self.threshold])

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "threshold": self.threshold,
            "capacity": self.capacity,
            "binary": self.binary,
            "value_dtype": self.value_dtype,
        }
