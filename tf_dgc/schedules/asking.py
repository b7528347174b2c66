"""Asking: a sparsity that may be a number or any callable of the iteration."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc.arguments import check_sparsity

_ROUNDED = 1e-7  # that a float32 may be off


class Scheduled(NamedTuple):
    """What a schedule says of a step.

    Attributes:
        now: sparsity of the step, scalar float64.
        least: the least that it ever is.
    """

    now: tf.Tensor
    least: float


def get(sparsity: Any) -> float | Callable[[tf.Tensor], tf.Tensor]:
    """Return a valid sparsity: a float in [0, 1), or a schedule.

    A schedule is any callable of the iteration. Before the first step it is called at
    iteration 0 alone, so that a wrong one is found when the optimizer is made, and it
    is traced, where workers compare theirs; and it is checked at every step.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(sparsity, dict):
        sparsity = keras.saving.deserialize_keras_object(sparsity)
    if not callable(sparsity):
        return check_sparsity(sparsity)
    first(sparsity)
    final(sparsity)
    smallest(sparsity)
    return sparsity


def config_of(sparsity: float | Callable) -> Any:
    """Return what `get` makes the same sparsity of, for a config."""
    if callable(sparsity):
        return keras.saving.serialize_keras_object(sparsity)
    return sparsity


def smallest(sparsity: float | Callable) -> float:
    """Return the least that a sparsity may be; 0 if a schedule does not say."""
    if callable(sparsity):
        return check_sparsity(getattr(sparsity, "smallest", 0.0), "smallest")
    return sparsity


def final(sparsity: float | Callable) -> float:
    """Return what a sparsity comes to, for what is decided before the first step.

    How long a run is, and up to which iteration a schedule knows an answer, only the
    user knows, so it is not asked. It says so by an attribute `final`, which functions
    may have too; of those that do not say it is what they begin with.
    """
    if not callable(sparsity):
        return sparsity
    stated = getattr(sparsity, "final", None)
    if stated is not None:
        return check_sparsity(stated, "final")
    ends = _ENDS.get(type(sparsity))
    end = ends(sparsity) if ends else None
    # Of Keras's one, a run may be over before it leaves what a sparsity can be.
    return first(sparsity) if end is None or not 0 <= end < 1 else end


# Of learning rates, which do not say it themselves.
_ENDS: dict[type, Callable[[Any], float]] = {
    keras.optimizers.schedules.PiecewiseConstantDecay: lambda given: given.values[-1],
    keras.optimizers.schedules.PolynomialDecay: lambda given: given.end_learning_rate,
}


def first(schedule: Callable[[tf.Tensor], tf.Tensor]) -> float:
    """Return what a schedule begins with, or raise `ValueError` as for a number."""
    with tf.init_scope():  # while a step may be traced
        value = schedule(tf.constant(0, tf.int64))
        # What is no number is refused as it is.
        with contextlib.suppress(TypeError, ValueError):
            value = float(value)
    return check_sparsity(value, "sparsity(0)")


def current(sparsity: float | Callable, iteration: tf.Tensor) -> float | tf.Tensor:
    """Return the sparsity of this step: the float, or the schedule's value now."""
    return at(sparsity, iteration) if callable(sparsity) else sparsity


def of_step(sparsity: float | Callable, iteration: tf.Tensor) -> float | Scheduled:
    """Return the sparsity of a step: the float, or what the schedule says of it."""
    if not callable(sparsity):
        return sparsity
    return Scheduled(at(sparsity, iteration), smallest(sparsity))


def at(schedule: Callable[[tf.Tensor], tf.Tensor], iteration: tf.Tensor) -> tf.Tensor:
    """Evaluate a schedule inside a training step, refusing values outside [0, 1).

    And those below what it says is its least, for which there may be no room.

    Raises:
        tf.errors.InvalidArgumentError: on every worker alike, at the iteration where
            the schedule returns such a value or NaN.
    """
    value, least = schedule(iteration), smallest(schedule)
    # A number of Python is a float32 to TensorFlow, and may be less than it was.
    value = tf.convert_to_tensor(
        value, tf.float64 if isinstance(value, float) else None
    )
    if value.dtype != tf.float64:
        value = tf.cast(value, tf.float64)
        value = tf.where(abs(value - least) < _ROUNDED, tf.maximum(value, least), value)
    valid = tf.logical_and(value >= least, value < 1)
    check = tf.debugging.Assert(
        valid,
        [f"the sparsity schedule must return a number in [{least:g}, 1), but returned",
         value, "at iteration", iteration],
    )  # fmt: skip
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(value)
