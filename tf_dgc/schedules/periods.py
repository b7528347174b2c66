"""Schedules of the period: local steps from one exchange to the next."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_steps
from tf_dgc.schedules.base import Schedule, check_boundaries, stage


@keras.saving.register_keras_serializable(package="tf_dgc")
class PiecewiseConstantPeriod(Schedule):
    """Local steps of a round, for `LocalOptimizer(period=...)`.

    `values[i]`, if the round begins with a step in `[boundaries[i-1], boundaries[i])`.

    Args:
        boundaries: ascending numbers of steps, one fewer than `values`.
        values: periods, whole numbers of steps, 1 or more.

    Raises:
        ValueError: for lengths, order or values other than that.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[int]):
        self.boundaries = check_boundaries(boundaries, values)
        self.values = [check_period(v, "values") for v in values]

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the period, scalar int64."""
        return tf.gather(tf.constant(self.values, tf.int64), stage(self, step))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"boundaries": self.boundaries, "values": self.values}


def check_period(value: Any, what: str = "period") -> int:
    """Return `value` as an int, or raise `ValueError` unless it is whole, 1 or more."""
    unit = " of local steps from one exchange to the next (1: in every step)"
    return check_steps(what, value, 1, unit)


def get_period(period: Any) -> int | Callable[[tf.Tensor], tf.Tensor]:
    """Return a valid period, an int or a schedule, as `get` does a sparsity.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(period, dict):
        period = keras.saving.deserialize_keras_object(period)
    if not callable(period):
        return check_period(period)
    first = period(tf.constant(0, tf.int64))
    # What is no number is refused as it is.
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        first = tf.convert_to_tensor(first).numpy().item()
    check_period(first, "period(0)")
    return period


def period_at(schedule: Callable[[tf.Tensor], tf.Tensor], step: tf.Tensor) -> tf.Tensor:
    """Evaluate a schedule of the period inside a training step, scalar int64.

    Raises:
        tf.errors.InvalidArgumentError: on every worker alike, for a period that is
            below 1, or not whole.
    """
    given = tf.convert_to_tensor(schedule(step))
    value = tf.cast(given, tf.int64)
    whole = tf.equal(tf.cast(value, given.dtype), given)
    check = tf.debugging.Assert(
        tf.logical_and(whole, value >= 1),
        ["the schedule of the period must return a whole number, 1 or more, but "
         "returned", given, "at step", step],
    )  # fmt: skip
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(value)
