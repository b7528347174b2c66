"""The inputs and the outcome of a step, which every implementation shares."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc.clipping import Scale
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import Message, Reply
from tf_dgc.compressors.base import Compressor
from tf_dgc.smart_cond import BoolOrTensor
from tf_dgc.steps.accumulation import Gradient
from tf_dgc.steps.native import UpdateRule
from tf_dgc.steps.plan import split_uncompressed
from tf_dgc.steps.preconditioning import Divisor
from tf_dgc.steps.state import WorkerState


class StepInputs(NamedTuple):
    """One worker's inputs of a step.

    Attributes:
        compressor: method of the compressed tensors.
        tensors: descriptions of the tensors that have a gradient in this step.
        indices: index of each among all tensors of the optimizer, for random keys.
        gradients: gradient of each tensor, not yet multiplied by `scales`: of any
            shape, or sparse with ascending, distinct rows.
        scales: factor of each gradient, from `clipping.clip_gradients`.
        worker_state: this worker's variables of these tensors.
        momentum: coefficient of momentum correction, in [0, 1).
        nesterov: whether that is Nesterov momentum.
        factor_masking: whether to clear the velocity of sent entries.
        seed: seed of all random choices; equal on all workers.
        iteration: number of the step, a scalar integer tensor.
        worker: index of this worker, an int or a scalar integer tensor.
        num_workers: number of workers, N.
        sizes: number of entries of every tensor of the optimizer, including those
            without a gradient in this step.
        drops_entries: whether the collective algorithm may drop entries on the way.
        all_workers_native: whether all workers have the native operations for these
            variables.
        machine: indices of the workers that sum their gradients before compression, in
            ascending order; only this one without an intra-node reduce.
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
        """Places of the tensors in each collective, see `plan.split_uncompressed`."""
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


TouchedEntries: TypeAlias = tuple[list[tf.Tensor], tf.Tensor]
"""Positions in each tensor, int32 `[m]`; and whether any other may have changed, too,
scalar bool."""


class StepOutcome(NamedTuple):
    """The result of a step; equal on all workers.

    Attributes:
        decode: function that returns the sum over workers of each tensor, `[n]` or of
            its shape, and the number of workers whose gradient was not finite, scalar
            int32. Both fail if a received message is malformed.
        entries: number of entries that one worker sent: an int, or a scalar int64
            tensor.
        sent_bytes: number of bytes that one worker passed to the collectives, likewise.
        apply: function that updates variables and slots in place, without sums in
            memory, and returns the second result of `decode`; None if the
            implementation has no such shortcut.
        all_or_none: whether to update nothing if a gradient was not finite.
        touched: function that returns the only entries of compressed tensors that can
            be nonzero in the sums, once for each worker that sent them; None if they
            are unknown.
    """

    decode: Callable[[], tuple[Sequence[tf.Tensor], tf.Tensor]]
    entries: int | tf.Tensor
    sent_bytes: int | tf.Tensor
    apply: Callable[[UpdateRule], tf.Tensor] | None = None
    all_or_none: bool = False
    touched: Callable[[], TouchedEntries] | None = None


Step: TypeAlias = Generator[list[Message], list[Reply], StepOutcome]
"""Yields the requests of a round, gets as many replies, and returns the outcome."""
