"""Compress: choose the k entries of largest magnitude, exactly k, always.

Lin et al., ICLR 2018, section 3.1 (gradient sparsification).
"""

import math

import tensorflow as tf

from tf_dgc import _internals
from tf_dgc.choice import Choice, choose

# `1 - 0.999` is a little more than 0.001; without this, 1000 entries would send 2.
_ROUNDING = 1e-6


def num_sent(size: int, sparsity: float | tf.Tensor) -> int | tf.Tensor:
    """Return `k = max(1, ceil((1 - sparsity) * size))`.

    Args:
        size: number of entries of the tensor, at least 1.
        sparsity: share not sent, in [0, 1): a float, or a scalar float64 tensor.

    Returns:
        An int, or a scalar int32 tensor if `sparsity` is one.
    """
    if isinstance(sparsity, float | int):
        return max(1, math.ceil((1.0 - sparsity) * size - _ROUNDING))
    k = tf.math.ceil((1.0 - sparsity) * size - _ROUNDING)
    return tf.maximum(1, tf.cast(k, tf.int32))


def top_k(
    values: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Choose the k entries of largest magnitude.

    Among equal magnitudes those that come first in cyclic order from `offset` are
    taken. With an offset drawn anew for each step, no position is favoured: cutting
    ties at the lowest index instead starves the end of a tensor.

    Args:
        values: float `[n]`, finite.
        k: how many, 1 <= k <= n.
        offset: scalar int32 in [0, n).

    Returns:
        Positions, int32 `[k]`, ascending; and the values there, `[k]`.
    """
    magnitudes = tf.abs(values)
    positions = choose(
        _prefers_heap(values.shape[0], k),
        lambda: _by_heap(magnitudes, k, offset),
        lambda: _by_threshold(magnitudes, k, offset),
    )
    return positions, tf.gather(values, positions)


def _prefers_heap(size: int, k: int | tf.Tensor) -> Choice:
    """`tf.math.top_k` is the faster one below about 1 % of the entries.

    Its time grows with k: a warm-up step at 75 % of 1 M entries takes it 100 ms, the
    threshold 23 ms. XLA compiles only the heap.
    """
    return _internals.in_xla_context() or k * 128 <= size


def _by_heap(magnitudes: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    rotated = tf.roll(magnitudes, -offset, axis=0)  # top_k takes the lowest index first
    positions = tf.math.top_k(rotated, k, sorted=False).indices
    return tf.sort(tf.math.floormod(positions + offset, magnitudes.shape[0]))


def _by_threshold(
    magnitudes: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tf.Tensor:
    threshold = tf.raw_ops.NthElement(input=magnitudes, n=k - 1, reverse=True)
    candidates = tf.cast(tf.where(magnitudes >= threshold)[:, 0], tf.int32)
    tied = tf.equal(tf.gather(magnitudes, candidates), threshold)
    num_tied = tf.math.count_nonzero(tied, dtype=tf.int32)
    before_offset = tf.logical_and(tied, candidates < offset)
    first = tf.math.count_nonzero(before_offset, dtype=tf.int32)
    ascending = tf.cumsum(tf.cast(tied, tf.int32), exclusive=True)
    cyclic = tf.math.floormod(ascending - first, num_tied)
    wanted = k - (tf.size(candidates) - num_tied)
    return tf.boolean_mask(candidates, ~tied | (cyclic < wanted))


def tie_offsets(sizes: list[int], seed: int, iteration: tf.Tensor) -> list[tf.Tensor]:
    """Draw one offset per tensor, the same on every worker.

    Args:
        sizes: number of entries of each tensor.
        seed: of the optimizer; TensorFlow's global seed is not touched.
        iteration: scalar integer, the step.

    Returns:
        Scalar int32 tensors, uniform in [0, size).
    """
    uniform = tf.random.stateless_uniform(
        [len(sizes)], seed=[seed, iteration], dtype=tf.float64
    )
    return [tf.cast(uniform[i] * size, tf.int32) for i, size in enumerate(sizes)]
