"""Encode and decode: everything one worker sends in a step, as one buffer.

A sparse step is a vector of int32 words (TensorFlow gathers int32, not bytes):

    word 0                     1 if this worker's gradient was not finite, else 0
    then for every tensor, in the order of the model's variables
      compressed               k positions, then k values
      exempt                   all n values

A value takes one word (float32) or two (float64). All sizes follow from the layout
and the sparsity, which every worker knows, so no lengths are exchanged. A dense step
is a float vector of all entries that is summed on the way, with the same flag first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class TensorLayout(NamedTuple):
    """What is known of a tensor before the step.

    Attributes:
        size: number of entries n.
        dtype: of the residual and on the wire, float32 or float64.
        exempt: whether it is always sent whole.
    """

    size: int
    dtype: tf.DType
    exempt: bool

    @property
    def words_per_value(self) -> int:
        """Words (of 32 bits) that one value takes."""
        return self.dtype.size // 4


class Selection(NamedTuple):
    """The entries of one tensor that are sent.

    Attributes:
        positions: int32 `[k]`, distinct and ascending; None for a whole tensor.
        values: float `[k]`, or `[n]` for a whole tensor.
    """

    positions: tf.Tensor | None
    values: tf.Tensor


def sparse_words(layout: Sequence[TensorLayout], counts: Sequence) -> int | tf.Tensor:
    """Return the length of the buffer of a sparse step, in words.

    Args:
        layout: of all tensors of the step.
        counts: entries sent of each, ints or scalar int32 tensors.
    """
    return 1 + sum(sum(_word_counts(t, k)) for t, k in zip(layout, counts, strict=True))


def dense_words(layout: Sequence[TensorLayout]) -> int:
    """Return the length of the vector of a dense step, in words."""
    return (1 + sum(t.size for t in layout)) * dense_dtype(layout).size // 4


def encode(selections: Sequence[Selection], finite: tf.Tensor) -> tf.Tensor:
    """Pack the selections of all tensors into one buffer.

    Args:
        selections: one per tensor, in layout order.
        finite: scalar bool, whether this worker's gradient was finite.

    Returns:
        int32 `[words]`.
    """
    parts = [_flag(finite, tf.int32)]
    for positions, values in selections:
        if positions is not None:
            parts.append(positions)
        parts.append(tf.reshape(tf.bitcast(values, tf.int32), [-1]))
    return tf.concat(parts, axis=0)


def decode(
    buffers: tf.Tensor, layout: Sequence[TensorLayout], counts: Sequence
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Sum the buffers of all workers.

    Workers are added one after the other: positions are distinct within one buffer,
    so the order of additions, and with it every bit of the result, is the same on all
    workers.

    Args:
        buffers: int32 `[num_workers, words]`, equal on all workers.
        layout: of all tensors of the step.
        counts: entries sent of each, ints or scalar int32 tensors.

    Returns:
        One dense float `[n]` per tensor, and the number of workers whose gradient was
        not finite, scalar int32.
    """
    word_counts = [_word_counts(t, k) for t, k in zip(layout, counts, strict=True)]
    sizes = [1, *(count for pair in word_counts for count in pair)]
    totals = [tf.zeros([t.size], t.dtype) for t in layout]
    nonfinite = tf.constant(0)
    for buffer in tf.unstack(buffers):
        flag, *parts = tf.split(buffer, sizes)
        nonfinite += flag[0]
        for i, tensor in enumerate(layout):
            values = _from_words(parts[2 * i + 1], tensor)
            if tensor.exempt:
                totals[i] += values
            else:
                where = parts[2 * i][:, tf.newaxis]
                totals[i] = tf.tensor_scatter_nd_add(totals[i], where, values)
    return totals, nonfinite


def encode_dense(tensors: Sequence[tf.Tensor], finite: tf.Tensor) -> tf.Tensor:
    """Concatenate all tensors whole, for an all-reduce.

    Args:
        tensors: float32 or float64 `[n]` each.
        finite: scalar bool, whether this worker's gradient was finite.

    Returns:
        `[1 + sum of n]`, float64 if any tensor is, else float32.
    """
    dtype = dense_dtype(tensors)
    return tf.concat([_flag(finite, dtype), *(tf.cast(t, dtype) for t in tensors)], 0)


def decode_dense(
    vector: tf.Tensor, layout: Sequence[TensorLayout]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Split the sum of what `encode_dense` made; returns as `decode` does."""
    flag, *parts = tf.split(vector, [1, *(t.size for t in layout)])
    totals = [tf.cast(p, t.dtype) for p, t in zip(parts, layout, strict=True)]
    return totals, tf.cast(flag[0], tf.int32)


def dense_dtype(tensors: Sequence[TensorLayout | tf.Tensor]) -> tf.DType:
    """Return the type in which tensors are summed together: the widest."""
    wide = any(t.dtype == tf.float64 for t in tensors)
    return tf.float64 if wide else tf.float32


def _flag(finite: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.logical_not(finite), dtype)[tf.newaxis]


def _word_counts(tensor: TensorLayout, k: int | tf.Tensor) -> tuple:
    """Words of a tensor's positions and of its values."""
    if tensor.exempt:
        return 0, tensor.size * tensor.words_per_value
    return k, k * tensor.words_per_value


def _from_words(words: tf.Tensor, tensor: TensorLayout) -> tf.Tensor:
    if tensor.words_per_value > 1:
        words = tf.reshape(words, [-1, tensor.words_per_value])
    return tf.bitcast(words, tensor.dtype)
