"""IEEE float16 on the wire, summed in float16."""

import math
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tf_dgc.codecs import value_types
from tf_dgc.collectives.requests import Aggregation, AllReduce, Result
from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class Float16(Quantizer):
    """Rounds to float16 and sums in float16: 2 bytes per entry.

    Micikevicius et al., section 3.2, recommend float16 for values, and a loss scale so
    that small gradients do not underflow: there is no number below 6e-8. Magnitudes are
    clipped to 2047, so that the sum of 32 workers is finite; every doubling of the
    workers halves that limit (1023.5 for 33 to 64). With error feedback both losses
    stay in the sender's residual; rounding errors of the sum do not.
    """

    name = "float16"
    reference = "Micikevicius et al., Mixed precision training, ICLR 2018"
    aggregation = "sum"
    error_feedback = "optional"
    unit_roundoff: ClassVar[float] = 2.0**-11
    wire_dtype: Any = tf.float16

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return 2 bytes per entry."""
        del dtype
        return self.wire_dtype.size * math.prod(shape)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Clip, round and sum."""
        del state
        limit = value_types.largest_term(self.wire_dtype, keys.num_workers)
        limited = value_types.bound(values, limit)
        narrow = value_types.round_to(limited, self.wire_dtype)
        total = yield AllReduce(narrow)
        return Result(tf.cast(total, values.dtype), tf.cast(narrow, values.dtype))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        del shape
        summed_as = self.wire_dtype
        return NativeMethod(summed_as.name, summed_as=summed_as, needs_term_bound=True)

    def error_bound(self, size: int) -> float:
        """Return the square of the unit roundoff, for entries in the normal range."""
        del size
        return self.unit_roundoff**2
