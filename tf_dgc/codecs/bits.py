"""Tensors of any number type as 32-bit words, and bit streams in words.

Bit streams fill words from the least significant bit (wire_format.md). Words are
int32, but uint32 where bits are shifted right: a right shift of a negative int32 fills
in ones.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def to_words(values: tf.Tensor) -> tf.Tensor:
    """Return the bits of numbers as words, int32 `[w]`, padded to a whole word.

    The type must have 2, 4 or 8 bytes.
    """
    if values.dtype.size < tf.int32.size:
        flat = tf.reshape(values, [-1])
        flat = tf.pad(flat, [[0, tf.size(flat) % 2]])
        return tf.bitcast(tf.reshape(flat, [-1, 2]), tf.int32)
    return tf.reshape(tf.bitcast(values, tf.int32), [-1])


def from_words(words: tf.Tensor, like: tf.Tensor | tf.TensorSpec) -> tf.Tensor:
    """Return the numbers that `to_words` converted, of the dtype and shape of `like`.

    A spec's shape must be fully defined.
    """
    is_static = None not in like.shape
    shape = like.shape if is_static else tf.shape(like)
    if like.dtype.size < tf.int32.size:
        flat = tf.reshape(tf.bitcast(words, like.dtype), [-1])
        size = like.shape.num_elements() if is_static else tf.size(like)
        return tf.reshape(flat[:size], shape)
    width = like.dtype.size // tf.int32.size
    split = tf.reshape(words, [-1, width] if width > 1 else [-1])
    return tf.reshape(tf.bitcast(split, like.dtype), shape)


def num_words_of(dtype: tf.DType, size: int) -> int:
    """Return the words of `size` numbers of a type of 2, 4 or 8 bytes."""
    words: int = -(-dtype.size * size // tf.int32.size)
    return words


def num_entries(values: tf.Tensor) -> int | tf.Tensor:
    """Return the size: an int if it is known statically, else a scalar int64 tensor."""
    entries = values.shape.num_elements()
    return tf.size(values, tf.int64) if entries is None else entries


def num_bytes(values: tf.Tensor) -> int | tf.Tensor:
    """Return the bytes: an int if known statically, else a scalar int64 tensor."""
    return num_entries(values) * values.dtype.size


def num_stream_words(bits: int | tf.Tensor) -> int | tf.Tensor:
    """Return the words of a stream of `bits` bits."""
    return (bits + 31) // 32


def pack_bits(bits: tf.Tensor) -> tf.Tensor:
    """Return the words of a stream, int32 `[ceil(b / 32)]`, of bits, int32 `[b]`."""
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
    """Count the streams with unused bits that are set in the last word, int32 `[N]`.

    The streams, of so many bits each, follow each other from word `start` on.
    """
    bits = tf.convert_to_tensor(streams, tf.int64)
    last = tf.gather(buffers, start - 1 + tf.cumsum(num_stream_words(bits)), axis=1)
    # A full word has no unused bits, and an empty stream has no last word: both shift
    # everything out. In two steps, as a shift by 32 is undefined.
    used = tf.cast(tf.math.floormod(bits - 1, 32), tf.uint32)
    unused = tf.bitwise.right_shift(to_unsigned(last), used)
    unused = tf.bitwise.right_shift(unused, tf.constant(1, tf.uint32))
    return tf.math.count_nonzero(unused, axis=1, dtype=tf.int32)


def to_unsigned(words: tf.Tensor) -> tf.Tensor:
    """Return the same bits as uint32."""
    return tf.bitcast(words, tf.uint32)
