"""How far a worker moves in a round: from the anchor, and back to it.

All but the making of variables is called in replica context, and touches the replica's
own copies only.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.choice import Choice, choose
from tf_dgc.distribute.worker_variables import SharedVariable
from tf_dgc.inner.updating import update
from tf_dgc.optimizers.kept import Kept
from tf_dgc.steps import accumulation
from tf_dgc.steps.base import Inputs, Outcome
from tf_dgc.transforms import clipping


def make_anchor(variables: Sequence[keras.Variable]) -> list[SharedVariable]:
    """Return a variable for what each variable of the model was as a round began."""
    return [
        SharedVariable(np.zeros(v.shape), v.dtype, f"{v.path.replace('/', '_')}_anchor")
        for v in variables
    ]


def cast_anchor(
    anchor: Sequence[SharedVariable],
    variables: Sequence[keras.Variable],
    begins: Choice,
) -> None:
    """Let the anchor be what the variables are, if a round begins."""

    def copy() -> tf.Tensor:
        for kept, v in zip(anchor, variables, strict=True):
            kept.assign(tf.convert_to_tensor(v.value))
        return tf.constant(True)

    choose(begins, copy, lambda: tf.constant(True))


def return_to(
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


def step_alone(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    num_workers: int,
    natively: bool,
) -> tf.Tensor:
    """Take a step by this worker's own loss, if its gradients are finite.

    Args:
        optimizer: inner optimizer, which steps alone.
        gradients: tensors or `tf.IndexedSlices`, divided by the number of workers.
        variables: variable of each.
        num_workers: number of workers, N.
        natively: whether the native operations are there for these variables.

    Returns:
        Whether it was taken, scalar bool.
    """
    own = [
        accumulation.to_dense(g, v) * num_workers
        for g, v in zip(gradients, variables, strict=True)
    ]

    def step() -> tf.Tensor:
        sums = Outcome(lambda: (own, tf.constant(0)), 0, 0)
        update(optimizer, sums, variables, natively)
        return tf.constant(True)

    finite = clipping.all_finite(own, natively)
    return tf.cond(finite, step, lambda: tf.constant(False))


def collect(
    optimizer: Any,
    kept: Kept,
    places: Sequence[int],
    moved: Sequence[tf.Tensor],
    iteration: tf.Tensor,
) -> Inputs:
    """Return what goes into an exchange.

    Args:
        optimizer: `LocalOptimizer` whose exchange it is.
        kept: variables that the optimizer keeps.
        places: places of the tensors that are exchanged, ascending.
        moved: distance of this worker from the anchor, of each of them.
        iteration: number of the round.
    """
    number = optimizer.num_workers
    return Inputs(
        kept.chosen.compressor,
        [kept.tensors[place] for place in places],
        places,
        moved,
        [1.0 / number] * len(moved),
        kept.memory.of(places),
        momentum=0.0,
        nesterov=False,
        factor_masking=False,
        seed=optimizer.seed,
        iteration=iteration,
        worker=tf.distribute.get_replica_context().replica_id_in_sync_group,
        num_workers=number,
        sizes=[t.size for t in kept.tensors],
        drops_entries=optimizer.communicator.drops_entries,
        by_all=kept.natively,
        machine=optimizer.communicator.machine(),
    )
