"""Local steps, and their synchronization by the mean of all parameter deltas."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import clipping
from tf_dgc.conditions import BoolOrTensor, smart_cond
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.local.synchronizer import Synchronizer, assign_weights
from tf_dgc.multiworker import divergence
from tf_dgc.multiworker.worker_variables import ReplicaCopies, SharedVariable
from tf_dgc.optimizers.state import OptimizerState
from tf_dgc.optimizers.update import apply_update
from tf_dgc.steps import accumulation, implementations
from tf_dgc.steps.base import StepInputs, StepOutcome

if TYPE_CHECKING:
    from tf_dgc.local.optimizer import LocalOptimizer


def local_step(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    num_workers: int,
    use_native: bool,
) -> tf.Tensor:
    """Take a step with this worker's gradients if they are finite.

    Args:
        optimizer: inner optimizer, which contacts nobody.
        gradients: tensors or `tf.IndexedSlices`, divided by the number of workers.
        variables: variable of each gradient.
        num_workers: number of workers, N.
        use_native: whether the native operations support these variables.

    Returns:
        Whether the step was taken, scalar bool.
    """
    local_gradients = [
        accumulation.to_dense(g, v) * num_workers
        for g, v in zip(gradients, variables, strict=True)
    ]

    def step() -> tf.Tensor:
        outcome = StepOutcome(lambda: (local_gradients, tf.constant(0)), 0, 0)
        apply_update(optimizer, outcome, variables, use_native)
        return tf.constant(True)

    finite = clipping.all_finite(local_gradients, use_native)
    return tf.cond(finite, step, lambda: tf.constant(False))


class AveragingSynchronizer(Synchronizer):
    """Applies the mean parameter delta to the anchor, and moves each worker to it.

    Attributes:
        anchor: one variable per model variable: its value when the round began.
    """

    def __init__(
        self,
        optimizer: "LocalOptimizer",
        state: OptimizerState,
        variables: Sequence[keras.Variable],
    ):
        super().__init__(optimizer, state, variables)
        self.anchor = [
            SharedVariable(
                np.zeros(v.shape), v.dtype, f"{v.path.replace('/', '_')}_anchor"
            )
            for v in variables
        ]

    def start_round(self, rounds: RoundCounter) -> None:
        """Copy the weights to the anchor if a round begins."""
        self._update_anchor(rounds.begins())

    def synchronize(self, rounds: RoundCounter) -> None:
        """Exchange the parameter deltas, update the anchor, and count the round."""
        state, variables, round_number = self._state, self._variables, rounds.number
        deltas = parameter_deltas(self.anchor, variables)
        with tf.control_dependencies(deltas):
            assign_weights(variables, [a.local() for a in self.anchor])
        was_reset = self._inner_state.reset_if_nonfinite(deltas, state.use_native)
        indices = range(len(deltas))
        outcome, extra_bytes = self._exchange(indices, deltas, variables, round_number)
        extra_bytes += self._measure_distance(deltas, round_number)
        outer = self._optimizer.outer_optimizer
        nonfinite = apply_update(outer, outcome, variables, state.use_native)
        self._inner_state.copy_weights(was_reset)
        sent_bytes = outcome.sent_bytes + extra_bytes
        self._count(outcome.entries, sent_bytes, variables, nonfinite)
        rounds.count_round(was_reset, weights_equal=True)

    def reach_consensus(self, rounds: RoundCounter) -> None:
        """Synchronize: all workers have the anchor's weights afterwards."""
        self.synchronize(rounds)

    def consensus_weights(self, use: str) -> list[list[tf.Tensor]]:
        """Return the anchor's values, which every worker holds."""
        del use
        copies = (ReplicaCopies(self._strategy, a.value).local for a in self.anchor)
        return [[c.read_value() for c in replicas] for replicas in copies]

    def _update_anchor(self, is_due: BoolOrTensor) -> None:
        """Copy the weights to the anchor if it is due."""

        def copy() -> tf.Tensor:
            for a, v in zip(self.anchor, self._variables, strict=True):
                a.assign(tf.convert_to_tensor(v.value))
            return tf.constant(True)

        smart_cond(is_due, copy, lambda: tf.constant(True))

    def _exchange(
        self,
        indices: Sequence[int],
        deltas: Sequence[tf.Tensor],
        checked: Sequence[Any],
        iteration: tf.Tensor,
    ) -> tuple[StepOutcome, Any]:
        """Sum the deltas of all workers; return the sum and the bytes of the check.

        Args:
            indices: indices of the tensors that are exchanged, ascending.
            deltas: parameter delta of each of them.
            checked: variables that must be equal on all workers.
            iteration: number of the exchange.
        """
        optimizer = self._optimizer
        step = implementations.start_step(
            delta_inputs(optimizer, self._state, indices, deltas, iteration)
        )
        check = divergence.create_check(
            self._strategy,
            checked,
            iteration,
            optimizer.diagnostics.check_every,
            optimizer.diagnostics.on_divergence,
        )
        return optimizer.communicator.run(step, check)


def parameter_deltas(
    anchor: Sequence[SharedVariable], variables: Sequence[keras.Variable]
) -> list[tf.Tensor]:
    """Return anchor minus weights, which the outer optimizer takes as a gradient."""
    return [
        a.local() - tf.convert_to_tensor(v.value)
        for a, v in zip(anchor, variables, strict=True)
    ]


def delta_inputs(
    optimizer: "LocalOptimizer",
    state: OptimizerState,
    indices: Sequence[int],
    deltas: Sequence[tf.Tensor],
    iteration: tf.Tensor,
) -> StepInputs:
    """Return the inputs of the step that exchanges parameter deltas."""
    num_workers = optimizer.num_workers
    return StepInputs(
        state.tuned.compressor,
        [state.tensors[i] for i in indices],
        indices,
        deltas,
        [1.0 / num_workers] * len(deltas),
        state.worker_state.of(indices),
        momentum=0.0,
        nesterov=False,
        factor_masking=False,
        seed=optimizer.seed,
        iteration=iteration,
        worker=tf.distribute.get_replica_context().replica_id_in_sync_group,
        num_workers=num_workers,
        sizes=[t.size for t in state.tensors],
        drops_entries=optimizer.communicator.drops_entries,
        all_workers_native=state.use_native,
        machine=optimizer.communicator.node_workers(),
    )
