"""Overlapping: a step in parts, each exchanged while the backward pass goes on.

Each part, of the tensors of a bucket, is a step of its own: nothing of it waits for the
gradients of others, and TensorFlow runs it as soon as its own are there. Collectives
stand in the order of the buckets, on all workers alike. What workers remember is as it
was before, and the model too, if a gradient of any part is not finite on any of them.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.choice import add_up
from tf_dgc.distribute.communicator import Communicator
from tf_dgc.distribute.divergence import Check
from tf_dgc.optimizers.inputs import Part
from tf_dgc.steps import kinds
from tf_dgc.steps.base import Outcome
from tf_dgc.steps.memory import Memory


def run(
    communicator: Communicator, parts: Sequence[Part], check: Check | None
) -> tuple[Outcome, int | tf.Tensor]:
    """Run a step, as `Communicator.run` does; call it in replica context.

    Args:
        communicator: communicator of the optimizer.
        parts: parts of the step, in the order in which the backward pass finishes them.
        check: rider of the first request; None for none.

    Returns:
        What the step comes to, and the bytes that the check took.
    """
    if len(parts) == 1:
        return communicator.run(kinds.begin(parts[0].inputs), check)
    before = [pair for part in parts for pair in _remember(part.inputs.memory)]
    first, *others = [kinds.begin(part.inputs) for part in parts]
    outcome, extra = communicator.run(first, check)
    outcomes = [outcome, *(communicator.run(step)[0] for step in others)]
    sums, nonfinite = _decode(parts, outcomes)
    _restore_if(tf.greater(nonfinite, 0), before)
    joined = Outcome(
        decode=lambda: (sums, nonfinite),
        entries=add_up([outcome.entries for outcome in outcomes]),
        sent_bytes=add_up([outcome.sent_bytes for outcome in outcomes]),
        all_or_none=True,
    )
    return joined, extra


def _decode(
    parts: Sequence[Part], outcomes: Sequence[Outcome]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the sums of all parts, and the number of gradients that left them out."""
    sums: dict[int, tf.Tensor] = {}
    counts = []
    for part, outcome in zip(parts, outcomes, strict=True):
        found, nonfinite = outcome.decode()
        sums.update(zip(part.places, found, strict=True))
        counts.append(nonfinite)
    return [sums[i] for i in sorted(sums)], tf.reduce_max(tf.stack(counts))


def _remember(memory: Memory) -> list[tuple[Any, tf.Tensor]]:
    """Return the variables that a step may assign, and their values.

    A value is not copied until something writes to its variable.
    """
    states = [variable for state in memory.states for variable in state.values()]
    return [(v, v.local()) for v in [*memory.residual, *memory.velocity, *states]]


def _restore_if(wanted: tf.Tensor, before: Sequence[tuple[Any, tf.Tensor]]) -> None:
    def restore() -> tf.Tensor:
        for variable, value in before:
            variable.assign(value)
        return tf.constant(True)

    tf.cond(wanted, restore, lambda: tf.constant(True))
