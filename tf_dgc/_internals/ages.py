"""Private names of what an optimizer remembers, and of how old that is."""

import types
from typing import Any

import keras
import tensorflow as tf


def count_age(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Let what this instance remembers have an age of its own.

    The bias corrections of an Adam go by it, and all else that `update_step` does with
    `iterations`. Schedules of the learning rate and accumulation go by the iterations
    (`_iterations`), of which `update_step` alone is shown others.

    Returns:
        Variable of the iteration with which the state began, 0 at first; of no
        aggregation, as those of an optimizer that steps alone.
    """
    began = keras.Variable(
        0, dtype=optimizer._iterations.dtype, trainable=False, name="began"
    )
    optimizer._tf_dgc_began = began  # by that Keras counts it among its variables
    stock = optimizer._backend_update_step

    def update_step(self: Any, grads: Any, variables: Any, learning_rate: Any) -> None:
        attributes = vars(self)  # not those that Keras tracks
        iterations = attributes["_iterations"]
        attributes["_iterations"] = tf.convert_to_tensor(iterations.value) - began.value
        try:
            stock(grads, variables, learning_rate)
        finally:
            attributes["_iterations"] = iterations

    optimizer._backend_update_step = types.MethodType(update_step, optimizer)
    return began


def counters(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return what an instance counts its age by; nothing if it does not."""
    began = getattr(optimizer, "_tf_dgc_began", None)
    return [] if began is None else [began]


def counts(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return all that an instance counts: its calls, and when its state began.

    Its `iterations` are no variable where it accumulates gradients.
    """
    return [optimizer._iterations, *counters(optimizer)]


def age(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return what `update_step` is to take for the iterations of this step."""
    for began in counters(optimizer):
        calls = tf.convert_to_tensor(optimizer._iterations.value) - began.value
        return calls // (optimizer.gradient_accumulation_steps or 1)
    return optimizer.iterations


def begin_anew(optimizer: keras.optimizers.Optimizer) -> None:
    """Let the state begin with this step; in replica context."""
    optimizer._tf_dgc_began.assign(optimizer._iterations.value)


def lists_of_slots(
    optimizer: keras.optimizers.Optimizer, number: int
) -> list[list[keras.Variable]]:
    """Return the attributes that are a variable for each of so many of the model.

    But for those of every Keras optimizer (`_variables`, `_trainable_variables`).
    """
    found = {k: v for k, v in vars(optimizer).items() if isinstance(v, list)}
    return [
        slots
        for name, slots in found.items()
        if name not in ("_variables", "_trainable_variables")
        and len(slots) == number
        and all(isinstance(v, keras.Variable) for v in slots)
    ]
