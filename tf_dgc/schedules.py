"""Schedules: sparsity, or the period of exchanges, as a function of the iteration.

Lin et al., ICLR 2018, section 3.3 (warm-up training): while the network changes fast,
large residuals do harm, so sparsity starts low and grows. So does the period of local
steps (Lin et al., ICLR 2020).
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_sparsity, check_whole

__all__ = [
    "PiecewiseConstantPeriod",
    "PiecewiseConstantSparsity",
    "SparsitySchedule",
    "WarmupSparsity",
    "for_steps",
]


class _Schedule(abc.ABC):
    """A number by iteration, with a config."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Build a schedule from `get_config`'s dictionary."""
        return cls(**config)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class SparsitySchedule(_Schedule):
    """Sparsity by iteration, in the manner of Keras learning-rate schedules.

    Subclasses implement `__call__` and `get_config`, and are made loadable with
    `keras.saving.register_keras_serializable`.
    """

    @abc.abstractmethod
    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, a scalar in [0, 1), at a scalar integer iteration."""

    @property
    def smallest(self) -> float:
        """The least sparsity there may be; XLA makes room for as many entries."""
        return 0.0


@keras.saving.register_keras_serializable(package="tf_dgc")
class PiecewiseConstantSparsity(SparsitySchedule):
    """`values[i]` while `boundaries[i-1] <= iteration < boundaries[i]`.

    Args:
        boundaries: ascending iterations, one fewer than `values`.
        values: sparsities in [0, 1).

    Raises:
        ValueError: for lengths, order or values other than that.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]):
        self.boundaries = _check_boundaries(boundaries, values)
        self.values = [check_sparsity(v, "values") for v in values]

    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, scalar float64."""
        return tf.gather(tf.constant(self.values, tf.float64), _stage(self, iteration))

    @property
    def smallest(self) -> float:
        """The least of `values`."""
        return min(self.values)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"boundaries": self.boundaries, "values": self.values}


@keras.saving.register_keras_serializable(package="tf_dgc")
class WarmupSparsity(SparsitySchedule):
    """The paper's warm-up: 75 %, 93.75 %, 98.4375 %, 99.6 %, then the final sparsity.

    For fewer than 15,000 steps use `tf_dgc.dgc_for_steps`.

    Args:
        warmup_steps: iterations until the final sparsity is reached, shared evenly
            among the stages (the paper takes 4 epochs, one per stage).
        final_sparsity: sparsity afterwards, in [0, 1); default 0.999.
        stages: sparsities before, in [0, 1); the default is the paper's.

    Raises:
        ValueError: if `warmup_steps` is not whole or below 1, there are no stages, or a
            sparsity is not in [0, 1).

    Example:
        >>> sparsity = WarmupSparsity(warmup_steps=4 * steps_per_epoch)
        >>> DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), sparsity=sparsity)
    """

    def __init__(
        self,
        warmup_steps: int,
        final_sparsity: float = 0.999,
        stages: Sequence[float] = (0.75, 0.9375, 0.984375, 0.996),
    ):
        if int(warmup_steps) != warmup_steps or warmup_steps < 1 or not stages:
            raise ValueError(
                "`warmup_steps` must be a whole number of iterations, 1 or more, and "
                "`stages` at least one sparsity. Without warm-up, pass the sparsity "
                f"itself, for example `DGCOptimizer(inner, {final_sparsity})`. "
                f"Received: warmup_steps={warmup_steps}, stages={stages}"
            )
        self.warmup_steps = int(warmup_steps)
        self.final_sparsity = check_sparsity(final_sparsity, "final_sparsity")
        self.stages = [check_sparsity(s, "stages") for s in stages]
        ends = [
            math.ceil(self.warmup_steps * (i + 1) / len(self.stages))
            for i in range(len(self.stages))
        ]
        self._piecewise = PiecewiseConstantSparsity(
            ends, [*self.stages, self.final_sparsity]
        )

    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, scalar float64."""
        return self._piecewise(iteration)

    @property
    def smallest(self) -> float:
        """The least of all stages."""
        return self._piecewise.smallest

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "warmup_steps": self.warmup_steps,
            "final_sparsity": self.final_sparsity,
            "stages": self.stages,
        }


@keras.saving.register_keras_serializable(package="tf_dgc")
class PiecewiseConstantPeriod(_Schedule):
    """Local steps of a round, for `LocalOptimizer(period=...)`.

    `values[i]`, if the round begins with a step in `[boundaries[i-1], boundaries[i])`.

    Args:
        boundaries: ascending numbers of steps, one fewer than `values`.
        values: periods, whole numbers of steps, 1 or more.

    Raises:
        ValueError: for lengths, order or values other than that.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[int]):
        self.boundaries = _check_boundaries(boundaries, values)
        self.values = [check_period(v, "values") for v in values]

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the period, scalar int64."""
        return tf.gather(tf.constant(self.values, tf.int64), _stage(self, step))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"boundaries": self.boundaries, "values": self.values}


def for_steps(steps: int) -> float:
    """Return the sparsity by which an entry is sent 15 times in a run, on average.

    What is not sent in time never reaches the model. It is `1 - 15 / steps`, 75 % at
    the least and 99.9 %, that of 15,000 steps and more, at the most.

    Args:
        steps: number of steps in which a model is trained, 1 or more.
    """
    density = 15 / check_whole("steps", steps, 1, " of training")
    return 1 - min(0.25, max(0.001, density))


def _check_boundaries(boundaries: Sequence[int], values: Sequence) -> list[int]:
    if len(values) != len(boundaries) + 1 or list(boundaries) != sorted(boundaries):
        raise ValueError(
            "`boundaries` must be ascending and one fewer than `values`. "
            f"Received: boundaries={boundaries}, values={values}"
        )
    return [int(b) for b in boundaries]


def _stage(schedule: Any, iteration: tf.Tensor) -> tf.Tensor:
    boundaries = tf.constant(schedule.boundaries, tf.int64)
    passed = tf.cast(iteration, tf.int64) >= boundaries
    return tf.reduce_sum(tf.cast(passed, tf.int32))


def check_period(value: Any, what: str = "period") -> int:
    """Return `value` as an int, or raise `ValueError` unless it is whole, 1 or more."""
    unit = " of local steps from one exchange to the next (1: in every step)"
    return check_whole(what, value, 1, unit)


def get_period(period: Any) -> int | Callable[[tf.Tensor], tf.Tensor]:
    """Return a valid period, an int or a schedule, as `get` does a sparsity.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(period, dict):
        period = keras.saving.deserialize_keras_object(period)
    if not callable(period):
        return check_period(period)
    first = tf.convert_to_tensor(period(tf.constant(0, tf.int64)))
    check_period(first.numpy().item(), "period(0)")
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


def get(sparsity: Any) -> float | Callable[[tf.Tensor], tf.Tensor]:
    """Return a valid sparsity: a float in [0, 1), or a schedule.

    A schedule is any callable of the iteration. It is called once, at iteration 0, so
    that a wrong one is found when the optimizer is made, and checked at every step.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(sparsity, dict):
        sparsity = keras.saving.deserialize_keras_object(sparsity)
    if not callable(sparsity):
        return check_sparsity(sparsity)
    check_sparsity(float(sparsity(tf.constant(0, tf.int64))), "sparsity(0)")
    return sparsity


def config_of(sparsity: float | Callable) -> Any:
    """Return what `get` makes the same sparsity of, for a config."""
    if callable(sparsity):
        return keras.saving.serialize_keras_object(sparsity)
    return sparsity


def smallest(sparsity: float | Callable) -> float:
    """Return the least that a sparsity may be; 0 if a schedule does not say."""
    if callable(sparsity):
        return float(getattr(sparsity, "smallest", 0.0))
    return sparsity


def current(sparsity: float | Callable, iteration: tf.Tensor) -> float | tf.Tensor:
    """Return the sparsity of this step: the float, or the schedule's value now."""
    return at(sparsity, iteration) if callable(sparsity) else sparsity


def at(schedule: Callable[[tf.Tensor], tf.Tensor], iteration: tf.Tensor) -> tf.Tensor:
    """Evaluate a schedule inside a training step, refusing values outside [0, 1).

    Raises:
        tf.errors.InvalidArgumentError: on every worker alike, at the iteration where
            the schedule leaves [0, 1) or returns NaN.
    """
    value = tf.cast(schedule(iteration), tf.float64)
    valid = tf.logical_and(value >= 0, value < 1)
    check = tf.debugging.Assert(
        valid,
        ["the sparsity schedule must return a number in [0, 1), but returned", value,
         "at iteration", iteration],
    )  # fmt: skip
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(value)
