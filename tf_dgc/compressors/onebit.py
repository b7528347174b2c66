"""1-bit SGD: one bit per entry, and two values per column."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.codecs import value_types
from tf_dgc.codecs.bits import num_stream_words, pack_bits, unpack_bits
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import Compressor, NativeMethod, RandomKeys
from tf_dgc.compressors.common.one_round import from_words, sum_decoded, to_words


@keras.saving.register_keras_serializable(package="tf_dgc")
class OneBit(Compressor):
    """Sends a bit per entry, and the mean of what it stands for in every column.

    Seide et al.: an entry becomes a bit, by whether it is below 0, and the receiver
    puts the mean of the column's entries of the same bit in its place, which is the
    value of least squared error. What that loses is added to the next gradient, which
    they found essential: error feedback is required. 1 bit per entry and two float32
    per column travel.

    An entry that is 0 becomes the mean of those that are not below 0, and the residual
    takes it back. So rows without a gradient move about where they are.

    A column is what feeds one unit: Keras kernels hold it along all axes but the last,
    whose entries are the units. Tensors of rank below 2 are one column.

    Args:
        per_column: whether each column has its two means, as in the paper; False for
            two means of the whole tensor, which are cheaper where columns are short.
    """

    name = "one_bit"
    kind = "quantization"
    reference = "Seide et al., 1-bit SGD, Interspeech 2014"
    error_feedback = "required"

    def __init__(self, per_column: bool = True):
        self.per_column = bool(per_column)

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of two float32 per column, and of the bits."""
        del dtype
        return 4 * (2 * self._columns(shape) + num_stream_words(math.prod(shape)))

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Encode, gather, decode and sum."""
        del state, keys
        size, columns, dtype = (
            values.shape.num_elements(),
            self._columns(tuple(values.shape)),
            values.dtype,
        )

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
        """Return `1 - 1/n`: the worst is one entry, and zeros of the same bit."""
        return 1 - 1 / size

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"per_column": self.per_column}

    def _columns(self, shape: tuple[int, ...]) -> int:
        return shape[-1] if self.per_column and len(shape) > 1 else 1


def _encode(rows: tf.Tensor) -> tf.Tensor:
    """Return means of bit 0 and bit 1, then bits that are 1 for negative.

    Args:
        rows: gradient by rows and columns, float `[r, columns]`.
    """
    negative = rows < 0
    wide = tf.cast(rows, tf.float64)
    means = []
    for side in (~negative, negative):
        # In float64, where the order of float32 numbers does not matter.
        total = tf.reduce_sum(tf.where(side, wide, 0), axis=0)
        count = tf.math.count_nonzero(side, axis=0, dtype=tf.int32)
        means.append(tf.math.divide_no_nan(total, tf.cast(count, tf.float64)))
    coded = to_words(value_types.round_to(tf.concat(means, axis=0), tf.float32))
    bits = tf.reshape(tf.cast(negative, tf.int32), [-1])
    return tf.concat([coded, pack_bits(bits)], axis=0)


def _decode(words: tf.Tensor, size: int, columns: int, dtype: tf.DType) -> tf.Tensor:
    """Return float `[size]`."""
    split = 2 * columns
    means = tf.cast(from_words(words[:split], tf.float32, [2, columns]), dtype)
    bits = unpack_bits(words[tf.newaxis, split:])[0, :size]
    negative = tf.reshape(bits > 0, [-1, columns])
    return tf.reshape(tf.where(negative, means[1], means[0]), [-1])
