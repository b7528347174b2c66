"""Bits in words of 32, from the least significant up (docs/wire_format.md).

Words are int32 outside and uint32 where bits move: a right shift of a negative int32
would fill in ones.
"""

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


def excess(words: tf.Tensor, bits: int | tf.Tensor) -> tf.Tensor:
    """Return what stands in the unused bits of each stream's last word.

    Args:
        words: int32 `[N, w]`, of which a stream takes the last words, or none.
        bits: in a stream, an int or a scalar int64 tensor.

    Returns:
        uint32 `[N]`, below 2**31, and 0 where all is well.
    """
    if isinstance(bits, int) and bits % 32 == 0:
        return tf.zeros([words.shape[0]], tf.uint32)
    # One less, and one more below: a shift by 32 would not be defined.
    used = tf.cast((bits - 1) % 32, tf.uint32)
    last = tf.bitwise.right_shift(unsigned(words[:, -1:]), used)
    return tf.reduce_sum(tf.bitwise.right_shift(last, tf.constant(1, tf.uint32)), 1)


def unsigned(words: tf.Tensor) -> tf.Tensor:
    """Return the same bits as uint32."""
    return tf.bitcast(words, tf.uint32)
