"""Bits: tensors of any number type as words of 32 bits, and back."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def to_words(values: tf.Tensor) -> tf.Tensor:
    """Return the bits of numbers, int32 `[w]`, filled up to a whole word.

    Args:
        values: tensor of any shape, of a type of 2, 4 or 8 bytes.
    """
    if values.dtype.size < tf.int32.size:  # by twos
        flat = tf.reshape(values, [-1])
        flat = tf.pad(flat, [[0, tf.size(flat) % 2]])
        return tf.bitcast(tf.reshape(flat, [-1, 2]), tf.int32)
    return tf.reshape(tf.bitcast(values, tf.int32), [-1])


def from_words(words: tf.Tensor, like: tf.Tensor | tf.TensorSpec) -> tf.Tensor:
    """Return what `to_words` made words of.

    Args:
        words: bits, int32 `[w]`.
        like: tensor of the type and shape of the result; or, if that is known, what
            describes it.
    """
    known = None not in like.shape
    shape = like.shape if known else tf.shape(like)
    if like.dtype.size < tf.int32.size:
        flat = tf.reshape(tf.bitcast(words, like.dtype), [-1])
        return tf.reshape(
            flat[: like.shape.num_elements() if known else tf.size(like)], shape
        )
    width = like.dtype.size // tf.int32.size
    split = tf.reshape(words, [-1, width] if width > 1 else [-1])
    return tf.reshape(tf.bitcast(split, like.dtype), shape)


def num_words_of(dtype: tf.DType, size: int) -> int:
    """Return how many words numbers of a type take.

    Args:
        dtype: type of 2, 4 or 8 bytes.
        size: number of numbers.
    """
    return -(-dtype.size * size // tf.int32.size)


# --- Bits in words of 32, from the least significant up (docs/wire_format.md).
#
# Words are int32 outside and uint32 where bits move: a right shift of a negative int32
# would fill in ones.


def num_stream_words(bits: int | tf.Tensor) -> int | tf.Tensor:
    """Return how many words hold a number of bits."""
    return (bits + 31) // 32


def pack_bits(bits: tf.Tensor) -> tf.Tensor:
    """Return a stream's words, int32 `[ceil(b / 32)]`, of its bits, int32 `[b]`."""
    bits = tf.pad(bits, [[0, tf.math.floormod(-tf.size(bits), 32)]])
    shifted = tf.bitwise.left_shift(tf.reshape(bits, [-1, 32]), np.arange(32))
    return tf.reduce_sum(shifted, axis=1)


def unpack_bits(words: tf.Tensor) -> tf.Tensor:
    """Return the bits, uint32 `[N, 32 * w]`, of N streams, int32 `[N, w]`."""
    shifted = tf.bitwise.right_shift(
        to_unsigned(words)[:, :, tf.newaxis], np.arange(32, dtype=np.uint32)
    )
    bits = tf.bitwise.bitwise_and(shifted, tf.constant(1, tf.uint32))
    return tf.reshape(bits, [words.shape[0], -1])


def num_padding_bits_set(
    buffers: tf.Tensor, start: int, streams: Sequence[int | tf.Tensor]
) -> tf.Tensor:
    """Count the streams in whose last word unused bits are set.

    Args:
        buffers: words of all workers, int32 `[N, words]`.
        start: words before the first stream.
        streams: bits of each, one after the other: ints, or scalar int64 tensors.

    Returns:
        int32 `[N]`.
    """
    bits = tf.convert_to_tensor(streams, tf.int64)
    last = tf.gather(buffers, start - 1 + tf.cumsum(num_stream_words(bits)), axis=1)
    # All bits of a full word are used, and none of an empty stream's, which has no last
    # word: both shift everything out. In two steps, as a shift by 32 is undefined.
    used = tf.cast(tf.math.floormod(bits - 1, 32), tf.uint32)
    unused = tf.bitwise.right_shift(to_unsigned(last), used)
    unused = tf.bitwise.right_shift(unused, tf.constant(1, tf.uint32))
    return tf.math.count_nonzero(unused, axis=1, dtype=tf.int32)


def to_unsigned(words: tf.Tensor) -> tf.Tensor:
    """Return the same bits as uint32."""
    return tf.bitcast(words, tf.uint32)
