"""1-bit SGD: one bit per entry, and two values per column."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.codecs import value_types
from tf_dgc.codecs.bits import num_stream_words, pack_bits, to_words, unpack_bits
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import NativeMethod, Quantizer
from tf_dgc.compressors.common.one_round import from_words, sum_decoded
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class OneBit(Quantizer):
    """Sends one bit per entry, and for each column the means of both bits' entries.

    Seide et al.: an entry becomes a bit that says whether it is below 0. The receiver
    replaces it by the mean of the column's entries with the same bit, the value of
    least squared error. The error is added to the next gradient, which the authors
    found essential: error feedback is required. A payload has 1 bit per entry and two
    float32 per column.

    A zero becomes the mean of the entries that are not below 0, and the residual
    compensates for it in later steps: weights without a gradient fluctuate around their
    values.

    A column is the input of one unit: in Keras kernels the last axis indexes units.
    Tensors of rank below 2 are one column.

    Args:
        per_column: whether each column has its own two means, as in the paper; else the
            tensor has two means, which is smaller if columns are short.
    """

    name = "one_bit"
    reference = "Seide et al., 1-bit SGD, Interspeech 2014"
    error_feedback = "required"

    def __init__(self, per_column: bool = True):
        self.per_column = bool(per_column)

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of two float32 per column and of the bits."""
        del dtype
        return 4 * (2 * self._columns(shape) + num_stream_words(math.prod(shape)))

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Encode, gather, decode and sum."""
        del state, keys
        size, dtype = values.shape.num_elements(), values.dtype
        columns = self._columns(tuple(values.shape))

        def decode(words: tf.Tensor) -> tf.Tensor:
            return _decode(words, size, columns, dtype)

        words = _encode(tf.reshape(values, [-1, columns]))
        gathered = yield AllGather(words)
        return Result(sum_decoded(gathered, decode, [size], dtype), decode(words))

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        del shape
        return NativeMethod(self.name, [self.per_column])

    def error_bound(self, size: int) -> float:
        """Return `1 - 1/n`, reached by one entry and zeros with the same bit."""
        return 1 - 1 / size

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"per_column": self.per_column}

    def _columns(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if self.per_column and len(shape) > 1 else 1


def _encode(rows: tf.Tensor) -> tf.Tensor:
    """Return the means of bits 0 and 1, then the bits, of float `[r, columns]`."""
    negative = rows < 0
    wide = tf.cast(rows, tf.float64)  # where the order of a sum does not matter
    means = []
    for mask in (~negative, negative):
        total = tf.reduce_sum(tf.where(mask, wide, 0), axis=0)
        count = tf.math.count_nonzero(mask, axis=0, dtype=tf.int32)
        means.append(tf.math.divide_no_nan(total, tf.cast(count, tf.float64)))
    coded = to_words(value_types.round_to(tf.concat(means, axis=0), tf.float32))
    bits = tf.reshape(tf.cast(negative, tf.int32), [-1])
    return tf.concat([coded, pack_bits(bits)], axis=0)


def _decode(words: tf.Tensor, size: int, columns: int, dtype: tf.DType) -> tf.Tensor:
    split = 2 * columns
    means = tf.cast(from_words(words[:split], tf.float32, [2, columns]), dtype)
    bits = unpack_bits(words[tf.newaxis, split:])[0, :size]
    negative = tf.reshape(bits > 0, [-1, columns])
    return tf.reshape(tf.where(negative, means[1], means[0]), [-1])
