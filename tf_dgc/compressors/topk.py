"""Compress: choose the k entries of largest magnitude, exactly k, always.

Lin et al., ICLR 2018, section 3.1 (gradient sparsification).
"""

import math

import tensorflow as tf

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
    size = values.shape[0]
    rotated = tf.roll(tf.abs(values), -offset, axis=0)
    positions = tf.math.top_k(rotated, k, sorted=False).indices
    positions = tf.sort(tf.math.floormod(positions + offset, size))
    return positions, tf.gather(values, positions)


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
