"""Picks a step's implementation, and runs a step in one piece or in buckets.

An implementation is a function of `StepInputs` that returns a `Step`, or None for
inputs it does not support. The first in `IMPLEMENTATIONS` that returns a step is used.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.collectives.communicator import Communicator
from tf_dgc.conditions import add_counts
from tf_dgc.multiworker.divergence import ChecksumComparison
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.steps import engine_step, generic_step, top_k_step
from tf_dgc.steps.base import Step, StepInputs, StepOutcome

IMPLEMENTATIONS: list[Callable[[StepInputs], Step | None]] = [
    top_k_step.start_top_k_step,
    engine_step.start_engine_step,
    generic_step.start_generic_step,
]


def start_step(inputs: StepInputs) -> Step:
    """Return the step, which has not yet begun to run."""
    steps = (implementation(inputs) for implementation in IMPLEMENTATIONS)
    return next(step for step in steps if step is not None)


class StepBucket(NamedTuple):
    """The tensors of a step that are exchanged together."""

    places: Sequence[int]  # indices of its variables among those of the step
    inputs: StepInputs


def run_step(
    communicator: Communicator,
    buckets: Sequence[StepBucket],
    check: ChecksumComparison | None,
) -> tuple[StepOutcome, int | tf.Tensor]:
    """Compress and exchange all buckets of a step; call it in replica context.

    Each bucket is a step of its own, which TensorFlow runs as soon as the backward pass
    has computed its gradients. All workers start their collectives in the order of the
    buckets. If a gradient of any bucket is not finite, on any worker, the whole step is
    undone: the state has its former values and the model is not updated. The check is
    sent with the first bucket; its bytes are the second result.
    """
    if len(buckets) == 1:
        return communicator.run(start_step(buckets[0].inputs), check)
    before = [pair for bucket in buckets for pair in _values(bucket.inputs)]
    steps = [start_step(bucket.inputs) for bucket in buckets]
    first, check_bytes = communicator.run(steps[0], check)
    outcomes = [first, *(communicator.run(step)[0] for step in steps[1:])]
    sums, nonfinite = _decode(buckets, outcomes)
    _restore_if(tf.greater(nonfinite, 0), before)
    outcome = StepOutcome(
        decode=lambda: (sums, nonfinite),
        entries=add_counts([outcome.entries for outcome in outcomes]),
        sent_bytes=add_counts([outcome.sent_bytes for outcome in outcomes]),
        all_or_none=True,
    )
    return outcome, check_bytes


def _decode(
    buckets: Sequence[StepBucket], outcomes: Sequence[StepOutcome]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    sums: dict[int, tf.Tensor] = {}
    counts = []
    for bucket, outcome in zip(buckets, outcomes, strict=True):
        bucket_sums, nonfinite = outcome.decode()
        sums.update(zip(bucket.places, bucket_sums, strict=True))
        counts.append(nonfinite)
    return [sums[i] for i in sorted(sums)], tf.reduce_max(tf.stack(counts))


_StateValue = tuple[PerWorkerVariable | SharedVariable, tf.Tensor]


def _values(inputs: StepInputs) -> list[_StateValue]:
    state = inputs.worker_state
    of_method = [v for variables in state.states for v in variables.values()]
    variables = [*state.residual, *state.velocity, *of_method]
    return [(v, v.local()) for v in variables]


def _restore_if(condition: tf.Tensor, values: Sequence[_StateValue]) -> None:
    def restore() -> tf.Tensor:
        for variable, value in values:
            variable.assign(value)
        return tf.constant(True)

    tf.cond(condition, restore, lambda: tf.constant(True))
