"""Encode and decode a dense step: everything, uncoded, in a vector for an all-reduce.

A flag comes first, 1 if this worker's gradient was not finite, then all entries.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_dgc.codecs.tensor import Tensor


def num_words(layout: Sequence[Tensor]) -> int:
    """Return the length of the vector, in words of 32 bits."""
    return -(-num_entries(layout) * summed_dtype(layout).size // 4)


def num_entries(layout: Sequence[Tensor]) -> int:
    """Return the length of the vector."""
    return 1 + sum(t.size for t in layout)


def encode(
    tensors: Sequence[tf.Tensor], finite: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Concatenate all tensors whole.

    Args:
        tensors: values of each tensor, float `[n]`.
        finite: scalar bool, whether this worker's gradient was finite.
        dtype: dtype of the vector, `summed_dtype` of the layout.

    Returns:
        `[1 + sum of n]`.
    """
    flag = tf.cast(tf.logical_not(finite), dtype)[tf.newaxis]
    return tf.concat([flag, *(tf.cast(t, dtype) for t in tensors)], axis=0)


def decode(
    vector: tf.Tensor, layout: Sequence[Tensor]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Split the sum over workers of what `encode` made.

    Args:
        vector: vector of a dense step, float `[1 + sum of n]`.
        layout: sizes and dtypes of all tensors of the step.

    Returns:
        One float `[n]` per tensor, and the number of workers whose gradient was not
        finite, scalar int32.
    """
    flag, *parts = tf.split(vector, [1, *(t.size for t in layout)])
    totals = [tf.cast(p, t.dtype) for p, t in zip(parts, layout, strict=True)]
    return totals, tf.cast(flag[0], tf.int32)


def summed_dtype(layout: Sequence[Tensor]) -> tf.DType:
    """Return the type in which tensors are summed together.

    Of exempt ones alone that are coded it is bfloat16: there is no sum of codes. Beside
    others, nothing is coded.
    """
    if all(t.exempt and t.exempt_dtype for t in layout):
        return tf.bfloat16
    wide = any(t.dtype == tf.float64 for t in layout)
    return tf.float64 if wide else tf.float32
