"""The end of a round: by the mean of what all workers moved, from the anchor."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import clipping, metrics
from tf_dgc.local import synchronizer
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.local.synchronizer import Synchronizer
from tf_dgc.multiworker import divergence
from tf_dgc.multiworker.worker_variables import ReplicaCopies, SharedVariable
from tf_dgc.optimizers.state import OptimizerState
from tf_dgc.optimizers.update import apply_update
from tf_dgc.smart_cond import BoolOrTensor, smart_cond
from tf_dgc.steps import accumulation, implementations
from tf_dgc.steps.base import StepInputs, StepOutcome

# --- How far a worker moves in a round: from the anchor, and back to it.
#
# All but the making of variables is called in replica context, and touches the
# replica's
# own copies only.


def create_anchor(variables: Sequence[keras.Variable]) -> list[SharedVariable]:
    """Return a variable for what each variable of the model was as a round began."""
    return [
        SharedVariable(np.zeros(v.shape), v.dtype, f"{v.path.replace('/', '_')}_anchor")
        for v in variables
    ]


def update_anchor(
    anchor: Sequence[SharedVariable],
    variables: Sequence[keras.Variable],
    begins: BoolOrTensor,
) -> None:
    """Let the anchor be what the variables are, if a round begins."""

    def copy() -> tf.Tensor:
        for kept, v in zip(anchor, variables, strict=True):
            kept.assign(tf.convert_to_tensor(v.value))
        return tf.constant(True)

    smart_cond(begins, copy, lambda: tf.constant(True))


def parameter_delta(
    anchor: Sequence[SharedVariable], variables: Sequence[keras.Variable]
) -> list[tf.Tensor]:
    """Return how far the variables are from the anchor, and set them to it.

    Returns:
        Anchor minus variable, of each, of its type: what a gradient is to the outer
        optimizer.
    """
    kept = [a.local() for a in anchor]
    moved = [
        a - tf.convert_to_tensor(v.value) for a, v in zip(kept, variables, strict=True)
    ]
    with tf.control_dependencies(moved):
        for a, v in zip(kept, variables, strict=True):
            tf.raw_ops.AssignVariableOp(resource=v.value.handle, value=a)
    return moved


def local_step(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    num_workers: int,
    use_native: bool,
) -> tf.Tensor:
    """Take a step by this worker's own loss, if its gradients are finite.

    Args:
        optimizer: inner optimizer, which steps alone.
        gradients: tensors or `tf.IndexedSlices`, divided by the number of workers.
        variables: variable of each.
        num_workers: number of workers, N.
        use_native: whether the native operations are there for these variables.

    Returns:
        Whether it was taken, scalar bool.
    """
    own = [
        accumulation.to_dense(g, v) * num_workers
        for g, v in zip(gradients, variables, strict=True)
    ]

    def step() -> tf.Tensor:
        sums = StepOutcome(lambda: (own, tf.constant(0)), 0, 0)
        apply_update(optimizer, sums, variables, use_native)
        return tf.constant(True)

    finite = clipping.all_finite(own, use_native)
    return tf.cond(finite, step, lambda: tf.constant(False))


def delta_inputs(
    optimizer: Any,
    kept: OptimizerState,
    places: Sequence[int],
    moved: Sequence[tf.Tensor],
    iteration: tf.Tensor,
) -> StepInputs:
    """Return what goes into an exchange.

    Args:
        optimizer: `LocalOptimizer` whose exchange it is.
        kept: variables that the optimizer keeps.
        places: places of the tensors that are exchanged, ascending.
        moved: distance of this worker from the anchor, of each of them.
        iteration: number of the round.
    """
    number = optimizer.num_workers
    return StepInputs(
        kept.chosen.compressor,
        [kept.tensors[place] for place in places],
        places,
        moved,
        [1.0 / number] * len(moved),
        kept.worker_state.of(places),
        momentum=0.0,
        nesterov=False,
        factor_masking=False,
        seed=optimizer.seed,
        iteration=iteration,
        worker=tf.distribute.get_replica_context().replica_id_in_sync_group,
        num_workers=number,
        sizes=[t.size for t in kept.tensors],
        drops_entries=optimizer.communicator.drops_entries,
        all_workers_native=kept.use_native,
        machine=optimizer.communicator.node_workers(),
    )


class AveragingSynchronizer(Synchronizer):
    """Moves the anchor by the mean of all workers' moves, and each worker to it.

    Args:
        optimizer: `LocalOptimizer` whose rounds they are, its inner optimizer built.
        kept: variables that it keeps.
        variables: variables of the model.

    Attributes:
        anchor: variable of each variable of the model: what it was as the round began.
    """

    def __init__(
        self, optimizer: Any, kept: OptimizerState, variables: Sequence[keras.Variable]
    ):
        super().__init__(optimizer, kept, variables)
        self.anchor = create_anchor(variables)

    def agreed(self, what: str) -> list[list[tf.Tensor]]:
        """Return the anchor, see `Ending`."""
        del what  # it is at hand
        copies = (ReplicaCopies(self._strategy, a.value).local for a in self.anchor)
        return [[c.read_value() for c in replicas] for replicas in copies]

    def begin(self, rounds: RoundCounter) -> None:
        """Take the anchor, if a round begins; in replica context."""
        update_anchor(self.anchor, self._variables, rounds.begins())

    def consensus(self, rounds: RoundCounter) -> None:
        """Do the same as `end`, which leaves all workers alike."""
        self.end(rounds)

    def end(self, rounds: RoundCounter) -> None:
        """Exchange, and count the round; in replica context."""
        optimizer, made, number = self._optimizer, self._kept, rounds.number
        variables = self._variables
        moved = parameter_delta(self.anchor, variables)
        anew = self._inner.begin_anew_unless_finite(moved, made.use_native)
        everything = range(len(moved))
        step = implementations.start_step(
            delta_inputs(optimizer, made, everything, moved, number)
        )
        asks = number, optimizer.check_every, optimizer.on_divergence
        check = divergence.create_check(self._strategy, variables, *asks)
        outcome, asked = optimizer.communicator.run(step, check)
        rule = optimizer.outer_optimizer
        if self.drift:
            known = optimizer.communicator, optimizer.seed, number
            self.drift.measure(moved, *known)
            asked += synchronizer.DISTANCE_BYTES
        nonfinite = apply_update(rule, outcome, variables, made.use_native)
        self._inner.copy_weights(anew)
        metrics.count_step(
            made.worker_state.counters,
            entries=outcome.entries,
            sent_bytes=outcome.sent_bytes + asked,
            dense_bytes=metrics.dense_bytes(variables),
            nonfinite=nonfinite,
        )
        rounds.count_round(anew, alike=True)
