"""The plan of a fused step: how much of each tensor is sent, or everything."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.clipping import Scale
from tf_dgc.codecs import buffer
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import num_sent
from tf_dgc.schedules import ScheduledSparsity
from tf_dgc.smart_cond import BoolOrTensor, add_counts
from tf_dgc.steps.preconditioning import Divisor

# Bytes that take as long as one more collective does: half a millisecond at 1 Gbit/s.
_WORTH_A_COLLECTIVE = 1 << 16


class StepPlan(NamedTuple):
    """What a step sends, known to all workers before it.

    Attributes:
        layout: sizes and value types of all tensors of the step.
        counts: number of entries of each that a sparse step sends; ints, or scalar
            int32 tensors where the sparsity is scheduled.
        dense: whether everything is sent: a bool, or a scalar bool tensor.
        most_bytes: bytes of a sparse step's message at the most, where its counts are
            tensors and that is known.
    """

    layout: Sequence[TensorSpec]
    counts: Sequence[int | tf.Tensor]
    dense: BoolOrTensor
    most_bytes: int | None = None

    @property
    def entries(self) -> int | tf.Tensor:
        """Entries that one worker sends in this step: an int, or a scalar int64."""
        whole = sum(t.size for t in self.layout)
        chosen = add_counts(self.counts)
        if isinstance(self.dense, bool):
            return whole if self.dense else chosen
        return tf.where(self.dense, tf.cast(whole, tf.int64), tf.cast(chosen, tf.int64))

    @property
    def is_uncompressed(self) -> bool:
        """Whether all is exempt, and of one dtype: a dense step of many small ones."""
        dtypes = {(t.dtype, bool(t.uncompressed_dtype)) for t in self.layout}
        return all(t.uncompressed for t in self.layout) and len(dtypes) == 1

    @property
    def summed_dtype(self) -> tf.DType:
        """Type of the vector of a dense step."""
        return buffer.summed_dtype(self.layout)

    def coded_as(self, uncompressed_dtype: str | None) -> "StepPlan":
        """Return the same, with exempt tensors as this type."""
        layout = [
            t._replace(uncompressed_dtype=uncompressed_dtype) for t in self.layout
        ]
        return self._replace(layout=layout)

    @property
    def num_bytes(self) -> int:
        """Bytes of a worker's message, where all of this is known beforehand."""
        words = buffer.dense_words(self.layout)
        return 4 * (
            words if self.dense else buffer.sparse_words(self.layout, self.counts)
        )

    @property
    def dense_entries(self) -> int:
        """Length of the vector of a dense step."""
        return buffer.dense_entries(self.layout)


def plan_step(
    layout: Sequence[TensorSpec],
    sparsity: float | ScheduledSparsity,
    num_workers: int,
    num_shards: int = 1,
) -> StepPlan:
    """Decide what is sent.

    A step goes dense when nothing is left out, and when the sparse buffers of all
    workers would cost more than an all-reduce of everything: gathering sends a
    worker's buffer to N-1 others, a ring all-reduce sends each entry 2(N-1)/N times.

    Args:
        layout: sizes and value types of all tensors of the step.
        sparsity: share of entries not sent, in [0, 1). Of one that is scheduled, if no
            step goes dense by the least, none is asked whether it does.
        num_workers: number of workers, N.
        num_shards: number of shards of a tensor that is not exempt, of which this
            worker sends one's entries.
    """
    if isinstance(sparsity, ScheduledSparsity):
        most = plan_step(layout, sparsity.least, num_workers, num_shards)
        counts = _counts(layout, sparsity.now, num_shards)
        if not most.dense:
            return StepPlan(layout, counts, False, most.num_bytes)
        sparse_words = buffer.sparse_words(layout, counts)
        # As floats: N buffers of a large model overflow int32.
        both = 2.0 * buffer.dense_words(layout)
        ratio = tf.cast(sparse_words, tf.float64) * num_workers / both
        return StepPlan(layout, counts, tf.logical_or(sparsity.now <= 0, ratio > 1))
    counts = _counts(layout, sparsity, num_shards)
    costly = buffer.sparse_words(layout, counts) * num_workers
    return StepPlan(
        layout, counts, sparsity <= 0 or costly > 2 * buffer.dense_words(layout)
    )


def _counts(
    layout: Sequence[TensorSpec], sparsity: float | tf.Tensor, num_shards: int
) -> list[int | tf.Tensor]:
    """Return how many entries of each tensor a sparse step sends."""
    return [
        t.size if t.uncompressed else num_sent(-(-t.size // num_shards), sparsity)
        for t in layout
    ]


def split_uncompressed(
    tensors: Sequence[TensorSpec], num_workers: int, apart: bool | None = None
) -> list[list[int]]:
    """Return which tensors of a step travel together: all, or the exempt ones apart.

    What is gathered reaches a worker N-1 times, what is summed by a ring all-reduce
    2(N-1)/N times. Exempt tensors are summed where that saves more than another
    collective costs; so what a worker receives of them does not grow with N.

    Args:
        tensors: all tensors of the step.
        num_workers: number of workers, N.
        apart: whether exempt ones are apart, where that is known; None if it is to be
            decided.

    Returns:
        Places in `tensors`; if there are two shares, the second is the exempt ones'.
    """
    coded = any(t.uncompressed and t.uncompressed_dtype for t in tensors)
    # Where some are coded, those that are not are few, and stay with the others.
    chosen = [t.uncompressed and bool(t.uncompressed_dtype) == coded for t in tensors]
    uncompressed = [i for i, is_chosen in enumerate(chosen) if is_chosen]
    others = [i for i, is_chosen in enumerate(chosen) if not is_chosen]
    layout = [tensors[i] for i in uncompressed]
    gathered = 4 * buffer.uncompressed_words(layout)
    summed = buffer.summed_dtype(layout).size * sum(t.size for t in layout)
    saved = (num_workers - 1) * (gathered - summed * 2 / num_workers)
    apart = (
        saved > _WORTH_A_COLLECTIVE if apart is None else apart and bool(uncompressed)
    )
    if others and apart:
        return [others, uncompressed]
    return [list(range(len(tensors)))]


class LocalStep(NamedTuple):
    """What goes into a step on one worker.

    Attributes:
        plan: plan of what is sent.
        gradients: gradient of each tensor, as of `Inputs`.
        scales: factor of each gradient, as `clipping.clip` returns it.
        velocity: variables, one per tensor; None without momentum correction.
        residual: variables, one per tensor; None if nothing is ever kept back.
        offsets: position of each tensor where ties are broken from, scalar int32.
        momentum: coefficient of the correction, in [0, 1).
        nesterov: whether it is Nesterov's.
        factor_masking: whether to clear the velocity where entries are sent.
        divisors: divisor of each gradient, or None; nothing for none at all.
    """

    plan: StepPlan
    gradients: Sequence[tf.Tensor | tf.IndexedSlices]
    scales: Sequence[Scale]
    velocity: Sequence[Any] | None
    residual: Sequence[Any] | None
    offsets: list[tf.Tensor]
    momentum: float
    nesterov: bool
    factor_masking: BoolOrTensor
    divisors: Sequence[Divisor | None] = ()
