"""The data of a step: inputs, worker state, plan and outcome."""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import keras
import tensorflow as tf

from tf_dgc import metrics
from tf_dgc.clipping import Scale
from tf_dgc.codecs import buffer
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import Reply, Request
from tf_dgc.compressors import num_sent
from tf_dgc.compressors.base import Compressor
from tf_dgc.conditions import BoolOrTensor, add_counts
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.schedules import ScheduledSparsity
from tf_dgc.steps.accumulation import Gradient
from tf_dgc.steps.preconditioning import Divisor
from tf_dgc.steps.staleness import LastSent, Staleness

MethodState: TypeAlias = dict[str, PerWorkerVariable | SharedVariable]
_T = TypeVar("_T")

# Worker state


@dataclasses.dataclass(frozen=True)
class WorkerState:
    """One worker's variables of some tensors.

    `read...`, `store...` and `warn_if_nonfinite` run within a step, in replica context.

    Attributes:
        velocity: empty without momentum correction.
        residual: empty without error feedback.
        second_moment: empty unless gradients are divided by its root (Adam).
        largest_moment: likewise, largest second moment so far (AMSGrad).
        states: the method's state for each tensor, by name.
        common: the method's state that all tensors share, by name.
        counters: totals of what was sent, equal on all workers.
        last_sent: step in which each entry was last sent; None unless tracked.
    """

    tensors: Sequence[TensorSpec]
    velocity: Sequence[PerWorkerVariable]
    residual: Sequence[PerWorkerVariable]
    second_moment: Sequence[PerWorkerVariable]
    largest_moment: Sequence[PerWorkerVariable]
    states: Sequence[MethodState]
    common: MethodState
    counters: keras.Variable
    last_sent: LastSent | None

    @property
    def is_empty(self) -> bool:
        """Whether there are no variables of any tensor."""
        accumulators = (*self.velocity, *self.residual, *self.second_moment)
        return not (accumulators or self.common or any(self.states))

    def of(self, indices: Sequence[int]) -> "WorkerState":
        """Return the variables of some of the tensors, in this order."""

        def pick(items: Sequence[_T]) -> list[_T]:
            return [items[i] for i in indices] if items else []

        return dataclasses.replace(
            self,
            tensors=pick(self.tensors),
            velocity=pick(self.velocity),
            residual=pick(self.residual),
            second_moment=pick(self.second_moment),
            largest_moment=pick(self.largest_moment),
            states=pick(self.states),
        )

    def staleness(self) -> Staleness:
        """Return the staleness of this worker's entries; 0 if not tracked."""
        if self.last_sent is None:
            return Staleness(0.0, 0.0, 0.0)
        return self.last_sent.read(self.residual)

    def read(self, with_residual: bool) -> list[dict[str, tf.Tensor]]:
        """Return each tensor's state by name, optionally with "residual"."""
        states = [_read(state) for state in self.states]
        if not with_residual:
            return states
        if self.residual:
            residual = [r.local() for r in self.residual]
        else:
            residual = [tf.zeros(t.shape, t.dtype) for t in self.tensors]
        return [{**s, "residual": r} for s, r in zip(states, residual, strict=True)]

    def read_common(self) -> dict[str, tf.Tensor]:
        """Return the state that all tensors share, by name."""
        return _read(self.common)

    def store_residual(self, values: Sequence[tf.Tensor]) -> None:
        """Assign values of any shape, if there is a residual."""
        assign_all(self.residual, values)

    def store_velocity(self, values: Sequence[tf.Tensor]) -> None:
        """Assign values of any shape, if there is a velocity."""
        assign_all(self.velocity, values)

    def store_states(self, new: Sequence[dict[str, tf.Tensor]]) -> None:
        """Assign new values of each tensor's state, by name."""
        for state, values in zip(self.states, new, strict=True):
            _assign(state, values)

    def store_common(self, new: dict[str, tf.Tensor]) -> None:
        """Assign new values of the state that all tensors share, by name."""
        _assign(self.common, new)

    def warn_if_nonfinite(self, finite: tf.Tensor, iteration: tf.Tensor) -> None:
        """Warn once if this worker's gradient is not finite."""
        metrics.warn_once_if_nonfinite(self.counters, finite, iteration)


def assign_all(variables: Sequence[Any] | None, values: Sequence[tf.Tensor]) -> None:
    """Assign values of any shape to variables, if there are any."""
    if variables:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(tf.reshape(value, variable.shape))


def _read(state: MethodState) -> dict[str, tf.Tensor]:
    return {name: variable.local() for name, variable in state.items()}


def _assign(state: MethodState, values: dict[str, tf.Tensor]) -> None:
    for name, value in values.items():
        state[name].assign(value)


# Inputs


class StepInputs(NamedTuple):
    """One worker's inputs of a step.

    Attributes:
        tensors: tensors that have a gradient in this step.
        indices: index of each among all tensors of the optimizer, for random keys.
        gradients: not yet multiplied by `scales`: of any shape, or sparse with
            ascending, distinct rows.
        scales: factor of each gradient, from `clipping.clip_gradients`.
        momentum: coefficient of momentum correction, in [0, 1).
        seed: seed of all random choices; equal on all workers.
        iteration: scalar integer tensor.
        worker: index of this worker, an int or a scalar integer tensor.
        sizes: number of entries of every tensor of the optimizer, including those
            without a gradient in this step.
        drops_entries: whether the collective algorithm may drop entries on the way.
        all_workers_native: whether all workers have native operations for them.
        machine: workers that sum their gradients before compression, ascending; only
            this one without an intra-node reduce.
        divisors: divisor of each gradient, applied before accumulation, or None;
            empty if no gradient has one.
        separate_uncompressed: whether uncompressed tensors have a collective of their
            own; None to decide it from the tensors.
    """

    compressor: Compressor
    tensors: Sequence[TensorSpec]
    indices: Sequence[int]
    gradients: Sequence[Gradient]
    scales: Sequence[Scale]
    worker_state: WorkerState
    momentum: float
    nesterov: bool
    factor_masking: BoolOrTensor
    seed: int
    iteration: tf.Tensor
    worker: int | tf.Tensor
    num_workers: int
    sizes: Sequence[int]
    drops_entries: bool = False
    all_workers_native: bool = False
    machine: tuple[int, ...] = (0,)
    divisors: Sequence[Divisor | None] = ()
    separate_uncompressed: bool | None = None

    @property
    def shares(self) -> list[list[int]]:
        """Places of the tensors in each collective, see `split_uncompressed`."""
        return split_uncompressed(
            self.tensors, self.num_workers, self.separate_uncompressed
        )

    @property
    def sums_uncompressed(self) -> bool:
        """Whether uncompressed tensors are summed, even if the method gathers."""
        if self.separate_uncompressed is None:
            return len(self.shares) > 1
        return self.separate_uncompressed

    def of(self, places: Sequence[int]) -> "StepInputs":
        """Return the inputs of the same step for some of the tensors."""

        def pick(items: Sequence[Any]) -> list[Any]:
            return [items[place] for place in places]

        return self._replace(
            tensors=pick(self.tensors),
            indices=pick(self.indices),
            gradients=pick(self.gradients),
            scales=pick(self.scales),
            worker_state=self.worker_state.of(places),
            divisors=pick(self.divisors) if self.divisors else (),
        )


# Plan of a top-k step

# An additional collective costs as much as these bytes: half a millisecond at 1 Gbit/s.
_WORTH_A_COLLECTIVE = 1 << 16


class StepPlan(NamedTuple):
    """What each worker sends in a step; all workers know it before the step.

    Attributes:
        counts: entries of each tensor in a sparse step; ints, or scalar int32 tensors
            with a sparsity schedule.
        dense: whether all entries are sent.
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
    others; a ring all-reduce sends each entry 2(N-1)/N times. With `num_shards`, this
    worker sends entries of one shard of each compressed tensor.
    """
    if isinstance(sparsity, ScheduledSparsity):
        most = plan_step(layout, sparsity.minimum, num_workers, num_shards)
        counts = _counts(layout, sparsity.current, num_shards)
        if not most.dense:
            return StepPlan(layout, counts, False, most.num_bytes)
        sparse_words = buffer.sparse_words(layout, counts)
        # As floats: N buffers of a large model overflow int32.
        both = 2.0 * buffer.dense_words(layout)
        ratio = tf.cast(sparse_words, tf.float64) * num_workers / both
        return StepPlan(layout, counts, tf.logical_or(sparsity.current <= 0, ratio > 1))
    counts = _counts(layout, sparsity, num_shards)
    costly = buffer.sparse_words(layout, counts) * num_workers
    return StepPlan(
        layout, counts, sparsity <= 0 or costly > 2 * buffer.dense_words(layout)
    )


def _counts(
    layout: Sequence[TensorSpec], sparsity: float | tf.Tensor, num_shards: int
) -> list[int | tf.Tensor]:
    return [
        t.size if t.uncompressed else num_sent(-(-t.size // num_shards), sparsity)
        for t in layout
    ]


def split_uncompressed(
    tensors: Sequence[TensorSpec], num_workers: int, apart: bool | None = None
) -> list[list[int]]:
    """Return the places in each collective: all in one, or uncompressed ones second.

    A worker receives gathered values N-1 times, and values that a ring all-reduce sums
    2(N-1)/N times. So uncompressed tensors are summed in a collective of their own if
    that saves more than the collective costs; `apart` overrides this decision.
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
    """One worker's operands for correcting, selecting and encoding; see `StepInputs`.

    Attributes:
        velocity: variables, one per tensor; None without momentum correction.
        residual: variables, one per tensor; None without error feedback.
        offsets: position in each tensor from which ties are broken, scalar int32.
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


# Outcome


class UpdateRule(NamedTuple):
    """An inner optimizer's update that the native operations support.

    Attributes:
        names: name of each variable's rule in `custom_ops/cpu/rules.h`.
        hyperparameters: float64 `[6]` by rule name; the learning rate is first.
        slots: optimizer variables of each variable, in its rule's order.
        decays: whether weight decay applies to each variable.
    """

    names: Sequence[str]
    hyperparameters: dict[str, tf.Tensor]
    variables: Sequence[keras.Variable]
    slots: Sequence[Sequence[keras.Variable]]
    decays: Sequence[bool]

    @property
    def is_plain_sgd(self) -> bool:
        """Whether entries whose sum is 0 do not change."""
        return set(self.names) <= {"sgd"} and not any(self.decays)

    @property
    def is_float32(self) -> bool:
        """Whether all variables are float32."""
        return all(v.dtype == "float32" for v in self.variables)

    def of(self, places: Sequence[int]) -> "UpdateRule":
        """Return the rule for some of the variables."""
        return self._replace(
            names=[self.names[i] for i in places],
            variables=[self.variables[i] for i in places],
            slots=[self.slots[i] for i in places],
            decays=[self.decays[i] for i in places],
        )


TouchedEntries: TypeAlias = tuple[list[tf.Tensor], tf.Tensor]
"""Positions in each tensor, int32 `[m]`; and whether any other may have changed, too,
scalar bool."""


class StepOutcome(NamedTuple):
    """The result of a step; equal on all workers.

    Attributes:
        decode: returns the sum over workers of each tensor, `[n]` or of its shape, and
            the number of workers whose gradient was not finite, scalar int32. Both fail
            if a received message is malformed.
        entries: entries that one worker sent: an int, or a scalar int64 tensor.
        sent_bytes: bytes that one worker passed to the collectives, likewise.
        apply: updates variables and slots in place, without sums in memory, and returns
            the second result of `decode`; None without such a shortcut.
        all_or_none: whether to update nothing if a gradient was not finite.
        touched: returns the only entries of compressed tensors that can be nonzero in
            the sums, once for each worker that sent them; None if they are unknown.
    """

    decode: Callable[[], tuple[Sequence[tf.Tensor], tf.Tensor]]
    entries: int | tf.Tensor
    sent_bytes: int | tf.Tensor
    apply: Callable[[UpdateRule], tf.Tensor] | None = None
    all_or_none: bool = False
    touched: Callable[[], TouchedEntries] | None = None


Step: TypeAlias = Generator[list[Request], list[Reply], StepOutcome]
"""Yields the requests of a round, gets as many replies, and returns the outcome."""
