"""What goes into a step on one worker, and what comes out of it."""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc.clipping import Scale
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import Reply, Request
from tf_dgc.compressors.base import Compressor
from tf_dgc.smart_cond import BoolOrTensor
from tf_dgc.steps.accumulation import Gradient
from tf_dgc.steps.native import UpdateRule
from tf_dgc.steps.plan import split_uncompressed
from tf_dgc.steps.preconditioning import Divisor
from tf_dgc.steps.state import WorkerState


class StepInputs(NamedTuple):
    """What goes into a step on one worker.

    Attributes:
        compressor: method of all tensors that are not exempt.
        tensors: descriptions of those that have a gradient in this step.
        indices: index of each among all tensors of the optimizer, for draws.
        gradients: gradient of each tensor, not yet multiplied by `scales`: of any
            shape, or sparse with ascending and distinct rows.
        scales: factor of each gradient, as `clipping.clip` returns it.
        worker_state: variables of what this worker remembers of these tensors.
        momentum: coefficient of the correction, in [0, 1).
        nesterov: whether the correction is Nesterov's.
        factor_masking: whether to clear the velocity where entries are sent.
        seed: seed of all randomness; equal on all workers.
        iteration: number of the step, a scalar integer tensor.
        worker: index of this one among all, an int or a scalar integer tensor.
        num_workers: number of workers, N.
        sizes: entries of every tensor of the optimizer, also of those without a
            gradient in this step.
        drops_entries: whether the exchange may leave out entries on its way.
        all_workers_native: whether all workers have the native operations for these
            variables.
        machine: workers, ascending, that add up their gradients before they compress;
            this one alone if nothing is added up.
        divisors: divisor of each gradient, applied before it is accumulated, or None;
            nothing for none at all.
        separate_uncompressed: whether exempt tensors are summed apart, as it was
            decided of the step that this is a part of; None if it is a whole one.
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
        """Places of the tensors that travel together; see `plan.shares`."""
        return split_uncompressed(
            self.tensors, self.num_workers, self.separate_uncompressed
        )

    @property
    def sums_uncompressed(self) -> bool:
        """Whether exempt tensors are summed, whatever the others are."""
        known = self.separate_uncompressed
        return len(self.shares) > 1 if known is None else known

    def of(self, places: Sequence[int]) -> "StepInputs":
        """Return what goes into the same step of some of these tensors."""

        def pick(items: Sequence) -> list:
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
"""Positions of each tensor, int32 `[m]`, and whether it may be any, scalar bool."""


class StepOutcome(NamedTuple):
    """What a step comes to; equal on all workers.

    Attributes:
        decode: function that returns the sum over workers of each tensor, `[n]` or of
            its shape; and how many workers' gradients were not finite, scalar int32.
            Both are to be had only if nothing that was received is refused.
        entries: number of entries that one worker sent: an int, or a scalar int64
            tensor.
        sent_bytes: number of bytes that one worker handed to the collectives, likewise.
        apply: function that updates variables and slots in place, without sums in
            memory; returns what `decode` says of the workers. None if the step has no
            shorter way than `decode`.
        all_or_none: whether nothing is to be updated if a gradient was not finite.
        touched: function that returns which entries alone may be other than 0 in the
            sums, each as often as workers sent it; of exempt tensors none is named.
            None if that is not known.
    """

    decode: Callable[[], tuple[Sequence[tf.Tensor], tf.Tensor]]
    entries: int | tf.Tensor
    sent_bytes: int | tf.Tensor
    apply: Callable[[UpdateRule], tf.Tensor] | None = None
    all_or_none: bool = False
    touched: Callable[[], TouchedEntries] | None = None


Step: TypeAlias = Generator[list[Request], list[Reply], StepOutcome]
"""Yields the requests of a round, gets as many replies, and returns the outcome."""
