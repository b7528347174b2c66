"""Compress: choose the k entries of largest magnitude, exactly k, always.

Lin et al., ICLR 2018, section 3.1 (gradient sparsification).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc._internals import tracing
from tf_dgc.choice import Choice, choose
from tf_dgc.codecs import value_types
from tf_dgc.collectives.requests import Exchange
from tf_dgc.compressors.base import Compressor, Draw, Native
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.draws import draw_ties
from tf_dgc.ops import loader

# `1 - 0.999` is a little more than 0.001; without this, 1000 entries would send 2.
_ROUNDING = 1e-6

_SAMPLED_FROM = 1 << 17  # entries
_STRIDE = 64  # from one entry of the sample to the next


@keras.saving.register_keras_serializable(package="tf_dgc")
class TopK(Compressor):
    """Sends the k entries of largest magnitude, `k = max(1, ceil((1 - sparsity) * n))`.

    Lin et al., section 3.1; Stich et al., definition 2.1 (`top_k`). Positions take
    about `2 + log2(n / k)` bits each, values what `value_dtype` says.

    Args:
        sparsity: share of entries not sent, in [0, 1); or a schedule of the iteration.
        value_dtype: type of the values on the wire: None for the type of the residual,
            or one of `tf_dgc.codecs.value_types.CHOICES`.
    """

    name = "top_k"
    kind = "sparsification"
    reference = "Lin et al., Deep gradient compression, ICLR 2018"
    respects_largest = True

    def __init__(
        self, sparsity: float | Callable = 0.999, value_dtype: str | None = None
    ):
        self.sparsity = schedules.get(sparsity)
        value_types.check_choice(value_dtype)
        self.value_dtype = value_dtype

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int | None:
        """Return those of k positions and values; None if the sparsity is scheduled."""
        if callable(self.sparsity):
            return None
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        return 4 * sparse.num_words(size, k, self.value_dtype or dtype.name)

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], draw: Draw
    ) -> Exchange:
        """Choose, and gather."""
        del state
        values = tf.reshape(values, [-1])
        size = values.shape[0]
        k = num_sent(size, schedules.current(self.sparsity, draw.step))
        offset = tie_offset(size, draw)
        value_dtype = self.value_dtype or values.dtype.name
        if tf.is_tensor(k) and tracing.in_xla_context():
            return (yield from self._in_fixed_shapes(values, k, draw, value_dtype))
        positions, _ = top_k(values, k, offset)
        return (
            yield from sparse.exchange(values, positions, k, value_dtype, draw.largest)
        )

    def _in_fixed_shapes(
        self, values: tf.Tensor, k: tf.Tensor, draw: Draw, value_dtype: str
    ) -> Exchange:
        """Exchange in shapes that are known while tracing, for XLA.

        There is room for the most that the schedule ever sends; room that is not used
        is sent as 0.
        """
        size = values.shape[0]
        capacity = num_sent(size, schedules.smallest(self.sparsity))
        _check_capacity(value_dtype)
        positions, taken = top_k_of(values, capacity, k, tie_offset(size, draw))
        at = positions[:, tf.newaxis]
        kept = tf.where(taken, tf.gather(values, positions), 0)
        kept = value_types.at_most(kept, draw.largest)
        if capacity == size:
            # Where everything is sent, it is sent exactly: so must all steps be.
            coded = value_types.encode(kept, value_dtype)[tf.newaxis]
            rounded = value_types.decode(coded, value_dtype, capacity, values.dtype)[0]
            kept = tf.where(tf.equal(k, size), kept, rounded)
            value_dtype = values.dtype.name
        values = tf.scatter_nd(at, kept, [size])
        result = yield from sparse.exchange(values, positions, capacity, value_dtype)
        chosen = tf.tensor_scatter_nd_update(tf.zeros([size], tf.bool), at, taken)
        return result._replace(entries=k, chosen=chosen)

    def native(self, shape: tuple[int, ...]) -> Native | None:
        """Return the native method; None if the sparsity is scheduled."""
        if callable(self.sparsity):
            return None
        k = num_sent(math.prod(shape), self.sparsity)
        return Native(self.name, sparse.native_places(k, self.value_dtype))

    def error_bound(self, size: int) -> float | None:
        """Return `1 - k/n` (Stich et al., lemma A.1), if values are sent exactly."""
        if callable(self.sparsity) or self.value_dtype is not None:
            return None
        return 1 - num_sent(size, self.sparsity) / size

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        sparsity = schedules.config_of(self.sparsity)
        return {"sparsity": sparsity, "value_dtype": self.value_dtype}


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
        values: gradient, float `[n]`, finite.
        k: number of entries, 1 <= k <= n.
        offset: position where ties are broken from, scalar int32 in [0, n).

    Returns:
        Positions, int32 `[k]`, ascending; and the values there, `[k]`.
    """
    library = loader.native().library
    if library is not None and _on_a_cpu(values) and not tracing.in_xla_context():
        positions = library.tf_dgc_largest(values=values, k=k, offset=offset)
        return positions, tf.gather(values, positions)
    magnitudes = tf.abs(values)
    size = values.shape[0]
    sampled = not tracing.in_xla_context() and size >= _SAMPLED_FROM
    positions = choose(
        k * 16 <= size if sampled else False,
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
    positions = tf.math.floormod(best + offset, values.shape[0])
    order = tf.argsort(positions)
    return tf.gather(positions, order), order < k


def _check_capacity(value_dtype: str) -> None:
    """Raise `ValueError` if room that is not used cannot be told from what is."""
    if value_types.is_shared(value_dtype):
        raise ValueError(
            "XLA compiles only shapes that are known while tracing, and with a "
            "scheduled sparsity the magnitude or scale that values share by "
            f"`value_dtype={value_dtype!r}` is of a number of entries that is not. "
            "Pass `jit_compile=False` to `model.compile`, or choose a constant "
            "sparsity or another `value_dtype`."
        )


def _on_a_cpu(values: tf.Tensor) -> bool:
    """Whether values are where the native operation reads them, of a type it knows."""
    is_known = values.dtype in (tf.float32, tf.float64)
    return is_known and not tf.config.list_logical_devices("GPU")


def _prefers_heap(size: int, k: int | tf.Tensor) -> Choice:
    """`tf.math.top_k` is the faster one below about 1 % of the entries.

    Its time grows with k: a warm-up step at 75 % of 1 M entries takes it 100 ms, the
    threshold 23 ms. XLA compiles only the heap.
    """
    return tracing.in_xla_context() or k * 128 <= size


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
    return choose(
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


def tie_offset(size: int, draw: Draw) -> tf.Tensor:
    """Return one tensor's offset, scalar int32 in [0, size), alike on all workers."""
    return tf.cast(draw.tie() * size, tf.int32)


def tie_offsets(
    sizes: Sequence[int], seed: int, iteration: tf.Tensor
) -> list[tf.Tensor]:
    """Return `tie_offset` of every tensor.

    Args:
        sizes: number of entries of each tensor of the model.
        seed: seed of the optimizer.
        iteration: number of the step, a scalar integer tensor.

    Returns:
        Scalar int32 tensors, uniform in [0, size).
    """
    ties = draw_ties(seed, iteration, len(sizes))
    return tf.unstack(tf.cast(ties * tf.constant(sizes, tf.float64), tf.int32))
