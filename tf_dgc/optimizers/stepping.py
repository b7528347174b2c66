"""One step of `CompressedOptimizer`, from gradients to the update."""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc.choice import add_up
from tf_dgc.distribute import divergence
from tf_dgc.inner.taken import TakeOver
from tf_dgc.inner.updating import update
from tf_dgc.metrics import counting
from tf_dgc.optimizers import inputs, matching, overlapping, overwriting
from tf_dgc.optimizers.kept import Kept


def take_call(
    optimizer: Any,
    grads: list,
    variables: list[keras.Variable],
    took: TakeOver,
    made: Kept,
    strategy: tf.distribute.Strategy,
) -> None:
    """Take a step, or the part of one that a call is; arguments are those of `take`."""
    if made.remembers:
        grads, variables = matching.add_repeated(grads, variables)

    def step(given: list) -> None:
        take(optimizer, given, variables, took, made, strategy)

    if made.accumulation:
        made.accumulation.call(optimizer, grads, variables, step)
    else:
        step(grads)


def take(
    optimizer: Any,
    grads: list,
    variables: list[keras.Variable],
    took: TakeOver,
    made: Kept,
    strategy: tf.distribute.Strategy,
) -> None:
    """Take a step; call it in replica context.

    Args:
        optimizer: `CompressedOptimizer` whose step it is.
        grads: gradients of the variables.
        variables: variables of the model.
        took: settings of the inner optimizer that are applied in its place.
        made: variables that the optimizer keeps.
        strategy: strategy of the workers.
    """
    communicator = optimizer.communicator
    trained, overwritten = overwriting.split(grads, variables)
    extra = overwriting.overwrite(communicator, overwritten)
    if not trained:  # as by Keras, it counts
        optimizer.iterations.assign_add(1)
        nothing = {"entries": 0, "nonfinite": tf.constant(0)}
        counting.count_step(
            made.memory.counters, sent_bytes=extra, dense_bytes=extra, **nothing
        )
        return
    grads, variables = map(list, zip(*trained, strict=True))
    with tf.name_scope(optimizer.name):
        parts = inputs.collect_parts(optimizer, grads, variables, took, made)
        asks = optimizer.iterations.value, optimizer.check_every
        check = divergence.make_check(
            strategy, variables, *asks, optimizer.on_divergence
        )
        outcome, asked = overlapping.run(communicator, parts, check)
        if made.adam:
            outcome = made.adam.receive(outcome)
        known = made.natively, made.rule, took.weighs
        nonfinite = update(optimizer.inner_optimizer, outcome, variables, *known)
        refreshed = made.adam.refresh(communicator) if made.adam else 0
        counting.count_step(
            made.memory.counters,
            entries=outcome.entries,
            sent_bytes=add_up([outcome.sent_bytes, asked, extra, refreshed]),
            dense_bytes=counting.dense_bytes(variables) + extra,
            nonfinite=nonfinite,
        )
