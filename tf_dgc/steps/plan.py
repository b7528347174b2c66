"""The plan of a top-k step: how many entries of each tensor are sent, or all."""

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

# An additional collective costs as much as these bytes: half a millisecond at 1 Gbit/s.
_WORTH_A_COLLECTIVE = 1 << 16


class StepPlan(NamedTuple):
    """What each worker sends in a step; all workers know it before the step.

    Attributes:
        layout: sizes and value types of all tensors of the step.
        counts: number of entries of each tensor in a sparse step; ints, or scalar int32
            tensors with a sparsity schedule.
        dense: whether all entries are sent: a bool, or a scalar bool tensor.
        most_bytes: upper bound of a sparse message's bytes if counts are tensors and a
            bound is known.
    """

    layout: Sequence[TensorSpec]
    counts: Sequence[int | tf.Tensor]
    dense: BoolOrTensor
    most_bytes: int | None = None

    @property
    def entries(self) -> int | tf.Tensor:
        """Number of entries that one worker sends: an int, or a scalar int64."""
        whole = sum(t.size for t in self.layout)
        chosen = add_counts(self.counts)
        if isinstance(self.dense, bool):
            return whole if self.dense else chosen
        return tf.where(self.dense, tf.cast(whole, tf.int64), tf.cast(chosen, tf.int64))

    @property
    def is_uncompressed(self) -> bool:
        """Whether all tensors are uncompressed and of one dtype."""
        dtypes = {(t.dtype, bool(t.uncompressed_dtype)) for t in self.layout}
        return all(t.uncompressed for t in self.layout) and len(dtypes) == 1

    @property
    def summed_dtype(self) -> tf.DType:
        """Dtype of a dense step's vector."""
        return buffer.summed_dtype(self.layout)

    def coded_as(self, uncompressed_dtype: str | None) -> "StepPlan":
        """Return the plan with this value type for uncompressed tensors."""
        layout = [
            t._replace(uncompressed_dtype=uncompressed_dtype) for t in self.layout
        ]
        return self._replace(layout=layout)

    @property
    def num_bytes(self) -> int:
        """Bytes of a worker's message, if counts and `dense` are no tensors."""
        words = buffer.dense_words(self.layout)
        return 4 * (
            words if self.dense else buffer.sparse_words(self.layout, self.counts)
        )

    @property
    def dense_entries(self) -> int:
        """Length of a dense step's vector."""
        return buffer.dense_entries(self.layout)


def plan_step(
    layout: Sequence[TensorSpec],
    sparsity: float | ScheduledSparsity,
    num_workers: int,
    num_shards: int = 1,
) -> StepPlan:
    """Decide how many entries of each tensor are sent, and whether the step is dense.

    A step is dense if its sparsity is 0, or if gathering the sparse buffers would cost
    more than an all-reduce of all entries. Gathering sends a worker's buffer to N-1
    others; a ring all-reduce sends each entry 2(N-1)/N times.

    Args:
        layout: sizes and value types of all tensors of the step.
        sparsity: share of entries not sent, in [0, 1). If even the smallest value of a
            schedule makes no step dense, `dense` is False at trace time.
        num_workers: number of workers, N.
        num_shards: number of shards that a compressed tensor is split into; this worker
            sends entries of one of them.
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
    """Return the number of entries of each tensor in a sparse step."""
    return [
        t.size if t.uncompressed else num_sent(-(-t.size // num_shards), sparsity)
        for t in layout
    ]


def split_uncompressed(
    tensors: Sequence[TensorSpec], num_workers: int, apart: bool | None = None
) -> list[list[int]]:
    """Return the tensors of each collective: all in one, or uncompressed ones apart.

    A worker receives gathered values N-1 times, and values that a ring all-reduce sums
    2(N-1)/N times. So uncompressed tensors are summed in a collective of their own if
    that saves more than the collective costs.

    Args:
        tensors: all tensors of the step.
        num_workers: number of workers, N.
        apart: whether uncompressed tensors are apart; None to decide it.

    Returns:
        Places in `tensors`; of two lists the second is that of uncompressed tensors.
    """
    coded = any(t.uncompressed and t.uncompressed_dtype for t in tensors)
    # If some have a narrow value type, the few others stay with the compressed ones.
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
    """One worker's operands for correcting, selecting and encoding.

    Attributes:
        plan: plan of the step.
        gradients: gradient of each tensor, see `StepInputs`.
        scales: factor of each gradient.
        velocity: variables, one per tensor; None without momentum correction.
        residual: variables, one per tensor; None without error feedback.
        offsets: position in each tensor from which ties are broken, scalar int32.
        momentum: coefficient of momentum correction, in [0, 1).
        nesterov: whether that is Nesterov momentum.
        factor_masking: whether to clear the velocity of sent entries.
        divisors: divisor of each gradient, or None; empty if no gradient has one.
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
