"""Exact selection of the k entries of largest magnitude."""

import tensorflow as tf

from tf_dgc import native_library
from tf_dgc._internals import tracing
from tf_dgc.codecs import golomb
from tf_dgc.conditions import BoolOrTensor, smart_cond

_MIN_SAMPLED_SIZE = 1 << 17
_SAMPLE_STRIDE = 64


def top_k(
    values: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Select the k entries of largest magnitude.

    Among equal magnitudes, takes those that come first in cyclic order from `offset`.
    With an offset drawn anew for each step, no position is favored; always taking the
    lowest index would starve the end of a tensor.

    Args:
        values: gradient, float `[n]`, finite.
        k: number of entries, 1 <= k <= n.
        offset: position from which ties are broken, scalar int32 in [0, n).

    Returns:
        Positions, int32 `[k]`, ascending; and the values at these positions, `[k]`.
    """
    library = native_library.load_library().library
    if library is not None and _on_a_cpu(values) and not tracing.in_xla_context():
        positions = library.tf_dgc_largest(values=values, k=k, offset=offset)
        return positions, tf.gather(values, positions)
    magnitudes = tf.abs(values)
    size = values.shape[0]
    may_sample = not tracing.in_xla_context() and size >= _MIN_SAMPLED_SIZE
    positions = smart_cond(
        _are_few(k, size, 16) if may_sample else False,
        lambda: _by_sample(magnitudes, k, offset),
        lambda: _among_all(magnitudes, k, offset),
    )
    if isinstance(k, int):
        positions = tf.ensure_shape(positions, [k])
    return positions, tf.gather(values, positions)


def top_k_of(
    values: tf.Tensor, capacity: int, k: tf.Tensor, offset: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Select as `top_k`, with static shapes, for XLA; the tensor k is <= `capacity`.

    Returns the positions of the `capacity` largest entries, ascending, and whether each
    is among the k largest.
    """
    rotated = tf.roll(tf.abs(values), -offset, axis=0)
    best = tf.math.top_k(rotated, capacity).indices
    positions = golomb.unrotate(best, values.shape[0], offset)
    order = tf.argsort(positions)
    return tf.gather(positions, order), order < k


def _on_a_cpu(values: tf.Tensor) -> bool:
    """Return whether the native operation can read the values."""
    is_supported = values.dtype in (tf.float32, tf.float64)
    return is_supported and not tf.config.list_logical_devices("GPU")


def _are_few(k: int | tf.Tensor, size: int, divisor: int) -> BoolOrTensor:
    return k <= size // divisor  # `k * divisor` may overflow int32


def _by_sample(
    magnitudes: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tf.Tensor:
    """Search only entries above a threshold that a sample suggests.

    The threshold is chosen so that somewhat more than k entries exceed it. If fewer do,
    or if it is 0, all entries are searched.
    """
    sample = magnitudes[::_SAMPLE_STRIDE]
    expected = tf.cast(k, tf.float32) / _SAMPLE_STRIDE
    sampled = tf.cast(expected + 4 * tf.sqrt(expected) + 8, tf.int32)
    threshold = tf.reduce_min(tf.math.top_k(sample, sampled, sorted=False).values)

    def among_large() -> tf.Tensor:
        candidates = tf.cast(tf.where(magnitudes >= threshold)[:, 0], tf.int32)
        return tf.cond(
            tf.size(candidates) >= k,
            lambda: _by_heap(magnitudes, candidates, k, offset),
            lambda: _among_all(magnitudes, k, offset),
        )

    return tf.cond(
        threshold > 0, among_large, lambda: _among_all(magnitudes, k, offset)
    )


def _among_all(
    magnitudes: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tf.Tensor:
    # The time of `tf.math.top_k` grows with k: 100 ms for 25 % of 1 M entries, of which
    # the threshold takes 23 ms. Below about 1 % the heap is faster. XLA compiles only
    # the heap.
    size = magnitudes.shape[0]
    return smart_cond(
        tracing.in_xla_context() or _are_few(k, size, 128),
        lambda: _by_heap(magnitudes, tf.range(size), k, offset),
        lambda: _by_threshold(magnitudes, k, offset),
    )


def _by_heap(
    magnitudes: tf.Tensor, candidates: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tf.Tensor:
    """Return the k largest of the candidates, which are ascending positions."""
    before = tf.math.count_nonzero(candidates < offset, dtype=tf.int32)
    rotated = tf.roll(candidates, -before, axis=0)  # top_k takes the lowest index first
    best = tf.math.top_k(tf.gather(magnitudes, rotated), k, sorted=False).indices
    return tf.sort(tf.gather(rotated, best))


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
    num_taken = k - (tf.size(candidates) - num_tied)
    return tf.boolean_mask(candidates, ~tied | (cyclic < num_taken))
