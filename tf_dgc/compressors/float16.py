"""Half precision: IEEE float16 on the wire, summed on the way."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.codecs import value_types
from tf_dgc.collectives.requests import Aggregation, AllReduce, Result
from tf_dgc.compressors.base import Compressor, NativeMethod
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class Float16(Compressor):
    """Rounds to float16 and lets the all-reduce add in float16: 2 bytes per entry.

    Micikevicius et al., section 3.2, recommend float16 for values, and a loss scale so
    that small gradients do not vanish: below 6e-8 there is nothing. Magnitudes above
    2047 become 2047, so that the sum of 32 workers stays finite; of more workers half
    of that for every doubling, 1023.5 of 33 to 64. With error feedback both losses of
    the sender stay in its residual; rounding while summing does not.
    """

    name = "float16"
    kind = "quantization"
    reference = "Micikevicius et al., Mixed precision training, ICLR 2018"
    aggregation = "sum"
    error_feedback = "optional"
    rounding = 2.0**-11
    wire_dtype: Any = tf.float16

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return two bytes per entry."""
        del dtype
        return self.wire_dtype.size * math.prod(shape)

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Round, sum, and widen."""
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
        return self.rounding**2
