"""Bits in words of 32, from the least significant up (docs/wire_format.md).

Words are int32 outside and uint32 where bits move: a right shift of a negative int32
would fill in ones.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def num_words(bits: int | tf.Tensor) -> int | tf.Tensor:
    """Return how many words hold a number of bits."""
    return (bits + 31) // 32


def pack(bits: tf.Tensor) -> tf.Tensor:
    """Return a stream's words, int32 `[ceil(b / 32)]`, of its bits, int32 `[b]`."""
    bits = tf.pad(bits, [[0, tf.math.floormod(-tf.size(bits), 32)]])
    shifted = tf.bitwise.left_shift(tf.reshape(bits, [-1, 32]), np.arange(32))
    return tf.reduce_sum(shifted, axis=1)


def unpack(words: tf.Tensor) -> tf.Tensor:
    """Return the bits, uint32 `[N, 32 * w]`, of N streams, int32 `[N, w]`."""
    shifted = tf.bitwise.right_shift(
        unsigned(words)[:, :, tf.newaxis], np.arange(32, dtype=np.uint32)
    )
    bits = tf.bitwise.bitwise_and(shifted, tf.constant(1, tf.uint32))
    return tf.reshape(bits, [words.shape[0], -1])


def num_excess(
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
    last = tf.gather(buffers, start - 1 + tf.cumsum(num_words(bits)), axis=1)
    # All bits of a full word are used, and none of an empty stream's, which has no last
    # word: both shift everything out. In two steps, as a shift by 32 is undefined.
    used = tf.cast(tf.math.floormod(bits - 1, 32), tf.uint32)
    unused = tf.bitwise.right_shift(unsigned(last), used)
    unused = tf.bitwise.right_shift(unused, tf.constant(1, tf.uint32))
    return tf.math.count_nonzero(unused, axis=1, dtype=tf.int32)


def unsigned(words: tf.Tensor) -> tf.Tensor:
    """Return the same bits as uint32."""
    return tf.bitcast(words, tf.uint32)
