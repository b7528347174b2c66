"""Bits: tensors of any number type as words of 32 bits, and back."""

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


def num_words(dtype: tf.DType, size: int) -> int:
    """Return how many words numbers of a type take.

    Args:
        dtype: type of 2, 4 or 8 bytes.
        size: number of numbers.
    """
    return -(-dtype.size * size // tf.int32.size)
