"""The k entries of largest magnitude, exactly k, always: where they are."""

import tensorflow as tf

from tf_dgc import native_library
from tf_dgc._internals import tracing
from tf_dgc.codecs import golomb
from tf_dgc.smart_cond import BoolOrTensor, smart_cond

_SAMPLED_FROM = 1 << 17  # entries
_STRIDE = 64  # from one entry of the sample to the next


def top_k(
    values: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Choose the k entries of largest magnitude.

    Among equal magnitudes those that come first in cyclic order from `offset` are
    taken. With an offset drawn anew for each step, no position is favoured: cutting
    ties at the lowest index instead starves the end of a tensor.

    Args:
        values: gradient, float `[n]`, finite.
        k: number of entries, 1 <= k <= n.
        offset: position where ties are broken from, scalar int32 in [0, n).

    Returns:
        Positions, int32 `[k]`, ascending; and the values there, `[k]`.
    """
    library = native_library.load_library().library
    if library is not None and _on_a_cpu(values) and not tracing.in_xla_context():
        positions = library.tf_dgc_largest(values=values, k=k, offset=offset)
        return positions, tf.gather(values, positions)
    magnitudes = tf.abs(values)
    size = values.shape[0]
    sampled = not tracing.in_xla_context() and size >= _SAMPLED_FROM
    positions = smart_cond(
        _are_few(k, size, 16) if sampled else False,
        lambda: _by_sample(magnitudes, k, offset),
        lambda: _among_all(magnitudes, k, offset),
    )
    if isinstance(k, int):
        positions = tf.ensure_shape(positions, [k])
    return positions, tf.gather(values, positions)


def top_k_of(
    values: tf.Tensor, capacity: int, k: tf.Tensor, offset: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Choose as `top_k` does, but among a fixed number of entries, for XLA.

    Args:
        values: gradient, float `[n]`, finite.
        capacity: largest number of entries there may be, of k.
        k: number of entries, scalar int32, 1 <= k <= capacity.
        offset: position where ties are broken from, scalar int32 in [0, n).

    Returns:
        Positions of the `capacity` entries of largest magnitude, int32, ascending, and
        which of them are the k largest, bool.
    """
    rotated = tf.roll(tf.abs(values), -offset, axis=0)
    best = tf.math.top_k(rotated, capacity).indices
    positions = golomb.turn_back(best, values.shape[0], offset)
    order = tf.argsort(positions)
    return tf.gather(positions, order), order < k


def _on_a_cpu(values: tf.Tensor) -> bool:
    """Whether values are where the native operation reads them, of a type it knows."""
    is_known = values.dtype in (tf.float32, tf.float64)
    return is_known and not tf.config.list_logical_devices("GPU")


def _prefers_heap(size: int, k: int | tf.Tensor) -> BoolOrTensor:
    """`tf.math.top_k` is the faster one below about 1 % of the entries.

    Its time grows with k: a warm-up step at 75 % of 1 M entries takes it 100 ms, the
    threshold 23 ms. XLA compiles only the heap.
    """
    return tracing.in_xla_context() or _are_few(k, size, 128)


def _are_few(k: int | tf.Tensor, size: int, one_of: int) -> BoolOrTensor:
    """Whether k entries are at most one of so many; without a product in int32."""
    return k <= size // one_of


def _by_sample(
    magnitudes: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tf.Tensor:
    """Look through what is as large as k entries are by a sample, a few more than k.

    Hardly ever are they less: then, and where they are 0, all are looked through.
    """
    sample = magnitudes[::_STRIDE]
    share = tf.cast(k, tf.float32) / _STRIDE
    wanted = tf.cast(share + 4 * tf.sqrt(share) + 8, tf.int32)
    least = tf.reduce_min(tf.math.top_k(sample, wanted, sorted=False).values)

    def among_large() -> tf.Tensor:
        candidates = tf.cast(tf.where(magnitudes >= least)[:, 0], tf.int32)
        return tf.cond(
            tf.size(candidates) >= k,
            lambda: _by_heap(magnitudes, candidates, k, offset),
            lambda: _among_all(magnitudes, k, offset),
        )

    return tf.cond(least > 0, among_large, lambda: _among_all(magnitudes, k, offset))


def _among_all(
    magnitudes: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tf.Tensor:
    size = magnitudes.shape[0]
    return smart_cond(
        _prefers_heap(size, k),
        lambda: _by_heap(magnitudes, tf.range(size), k, offset),
        lambda: _by_threshold(magnitudes, k, offset),
    )


def _by_heap(
    magnitudes: tf.Tensor, candidates: tf.Tensor, k: int | tf.Tensor, offset: tf.Tensor
) -> tf.Tensor:
    """Return the k largest of ascending positions, of equal ones from `offset` on."""
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
    wanted = k - (tf.size(candidates) - num_tied)
    return tf.boolean_mask(candidates, ~tied | (cyclic < wanted))
