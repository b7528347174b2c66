"""Schedules of the sparsity, and of the period of local steps."""

import abc
import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import (
    check_number,
    check_sparsity,
    check_steps,
    is_whole,
    show,
    unknown_length,
)
from tf_dgc.conditions import ASSERTION

__all__ = [
    "FollowLearningRate",
    "PiecewiseConstantPeriod",
    "PiecewiseConstantSparsity",
    "SparsitySchedule",
    "WarmupSparsity",
    "for_steps",
]


class Schedule(abc.ABC):
    """A number as a function of the iteration, with a config."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Create a schedule from the dictionary that `get_config` returns."""
        return cls(**config)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={show(v)}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class SparsitySchedule(Schedule):
    """Base class of sparsity schedules, like Keras's learning rate schedules.

    Subclasses implement `__call__` and `get_config`. Register them with
    `keras.saving.register_keras_serializable` to load saved optimizers.
    """

    @abc.abstractmethod
    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, a scalar in [0, 1), at an iteration, a scalar int64."""

    @property
    def smallest(self) -> float:
        """The smallest sparsity the schedule may return; 0 if unknown.

        XLA reserves memory for that many entries. If no step is dense at this sparsity,
        dense steps are not traced, and steps are as fast as with a constant. If the
        schedule returns a smaller value, the step raises an error.
        """
        return 0.0

    @property
    def final(self) -> float | None:
        """The sparsity that the schedule reaches; None for that of iteration 0.

        It determines how much of an Adam's momentum is corrected, and which algorithm
        `collective="auto"` chooses.
        """
        return None


@keras.saving.register_keras_serializable(package="tf_dgc")
class PiecewiseConstantSparsity(SparsitySchedule):
    """`values[i]` while `boundaries[i-1] <= iteration < boundaries[i]`.

    Args:
        boundaries: ascending iterations, one fewer than `values`.
        values: sparsities in [0, 1).

    Raises:
        ValueError: for other lengths, order or values.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]):
        self.boundaries = _check_boundaries(boundaries, values)
        self.values = [check_sparsity(v, "values") for v in values]

    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, scalar float64."""
        values = tf.constant(self.values, tf.float64)
        return tf.gather(values, _stage_at(self.boundaries, iteration))

    @property
    def smallest(self) -> float:
        """The smallest of `values`."""
        return min(self.values)

    @property
    def final(self) -> float:
        """The last of `values`."""
        return self.values[-1]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"boundaries": self.boundaries, "values": self.values}


@keras.saving.register_keras_serializable(package="tf_dgc")
class WarmupSparsity(SparsitySchedule):
    """The paper's warm-up: 75 %, 93.75 %, 98.4375 %, 99.6 %, then the final sparsity.

    For fewer than 15,000 steps use `tf_dgc.dgc_for_steps`.

    Args:
        warmup_steps: iterations until the final sparsity is reached, divided evenly
            among the stages (4 epochs in the paper, one per stage).
        final_sparsity: sparsity after the warm-up, in [0, 1); default 0.999.
        stages: sparsities during the warm-up, in [0, 1); the default is the paper's.

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
        if not is_whole(warmup_steps) or warmup_steps < 1 or not _as_list(stages):
            raise ValueError(
                "`warmup_steps` must be a whole number of iterations, 1 or more, and "
                "`stages` at least one sparsity. Without warm-up, pass the sparsity "
                f"itself, for example `DGCOptimizer(inner, {final_sparsity})`"
                f"{unknown_length(warmup_steps)}. "
                f"Received: warmup_steps={show(warmup_steps)}, stages={show(stages)}"
            )
        self.warmup_steps = int(warmup_steps)
        self.final_sparsity = check_sparsity(final_sparsity, "final_sparsity")
        self.stages = [check_sparsity(s, "stages") for s in stages]
        boundaries = [
            math.ceil(self.warmup_steps * (i + 1) / len(self.stages))
            for i in range(len(self.stages))
        ]
        self._piecewise = PiecewiseConstantSparsity(
            boundaries, [*self.stages, self.final_sparsity]
        )

    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, scalar float64."""
        return self._piecewise(iteration)

    @property
    def smallest(self) -> float:
        """The smallest sparsity of all stages."""
        return self._piecewise.smallest

    @property
    def final(self) -> float:
        """The final sparsity."""
        return self.final_sparsity

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "warmup_steps": self.warmup_steps,
            "final_sparsity": self.final_sparsity,
            "stages": self.stages,
        }


@keras.saving.register_keras_serializable(package="tf_dgc")
class FollowLearningRate(SparsitySchedule):
    """A density that falls with the learning rate.

    An entry that waits does more harm the faster the weights change meanwhile, so more
    entries are sent while the learning rate is high:

        density = (1 - sparsity_at_peak) * (rate / peak)**exponent

    and at least `1 - final_sparsity`, at most `1 - sparsity_at_peak`.

    >>> rate = keras.optimizers.schedules.CosineDecay(0.1, 10_000)
    >>> sgd = keras.optimizers.SGD(rate, momentum=0.9)
    >>> tf_dgc.DGCOptimizer(sgd, tf_dgc.schedules.FollowLearningRate())

    Args:
        learning_rate: a `keras.optimizers.schedules.LearningRateSchedule`; None, in a
            `DGCOptimizer`, for the learning rate of its inner optimizer, which
            callbacks may change.
        peak: the largest learning rate, above 0. None for the largest of a schedule of
            Keras, or the optimizer's rate when the `DGCOptimizer` is created.
        sparsity_at_peak: sparsity at the largest learning rate, in [0, 1).
        final_sparsity: largest sparsity, in [0, 1), not below `sparsity_at_peak`.
        exponent: power of the learning rate, above 0.

    Raises:
        ValueError: for settings outside these ranges, or if `peak` is None and not
            known.
    """

    def __init__(
        self,
        learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
        peak: float | None = None,
        sparsity_at_peak: float = 0.75,
        final_sparsity: float = 0.999,
        exponent: float = 1.0,
    ):
        if isinstance(learning_rate, dict):
            learning_rate = keras.saving.deserialize_keras_object(learning_rate)
        kind = keras.optimizers.schedules.LearningRateSchedule
        if learning_rate is not None and not isinstance(learning_rate, kind):
            raise ValueError(
                "`learning_rate` must be a schedule of Keras, or None for that of a "
                f"`DGCOptimizer`. Received: learning_rate={show(learning_rate)}"
            )
        self.learning_rate = learning_rate
        self.sparsity_at_peak = check_sparsity(sparsity_at_peak, "sparsity_at_peak")
        self.final_sparsity = check_sparsity(final_sparsity, "final_sparsity")
        if self.final_sparsity < self.sparsity_at_peak:
            raise ValueError(
                "`final_sparsity` must not be below `sparsity_at_peak`. Received: "
                f"final_sparsity={show(final_sparsity)}, "
                f"sparsity_at_peak={show(sparsity_at_peak)}"
            )
        self.exponent = check_number("exponent", exponent, "(0, inf)")
        self._rate: Any = learning_rate
        if peak is None and learning_rate is not None:
            peak = _largest_rate(learning_rate)
        self.peak = None if peak is None else check_number("peak", peak, "(0, inf)")

    @classmethod
    def with_mean_density(
        cls,
        learning_rate: keras.optimizers.schedules.LearningRateSchedule,
        steps: int,
        density: float,
        **settings: Any,
    ) -> "FollowLearningRate":
        """Return the schedule that sends a given share of the entries on average.

        Args:
            learning_rate: schedule of Keras.
            steps: number of steps of the run, 1 or more.
            density: mean share of entries sent in these steps, above 0 and below 1.
            **settings: further arguments, except `sparsity_at_peak`.

        Raises:
            ValueError: if no `sparsity_at_peak` leads to this density.
        """
        points = np.linspace(0, check_steps("steps", steps) - 1, min(steps, 200))
        rates = tf.stack([learning_rate(int(i)) for i in np.rint(points)])

        def schedule_with(at_peak: float) -> "FollowLearningRate":
            return cls(learning_rate, sparsity_at_peak=at_peak, **settings)

        def mean_density(at_peak: float) -> float:
            return 1 - float(tf.reduce_mean(schedule_with(at_peak)._sparsity_of(rates)))

        lowest, highest = 0.0, schedule_with(0.0).final_sparsity
        if not mean_density(highest) <= density <= mean_density(lowest):
            raise ValueError(
                f"The mean density of these {steps} steps can be from "
                f"{mean_density(highest):.3g} to {mean_density(lowest):.3g}; choose "
                "another density, `final_sparsity` or `exponent`. "
                f"Received: density={show(density)}"
            )
        for _ in range(40):
            middle = (lowest + highest) / 2
            if mean_density(middle) > density:
                lowest = middle
            else:
                highest = middle
        return schedule_with(highest)

    def following(self, learning_rate: Any) -> "FollowLearningRate":
        """Return a copy that follows an optimizer's learning rate, unless it has one.

        Args:
            learning_rate: a variable, a schedule of Keras, or a function without
                arguments.
        """
        if self.learning_rate is not None:
            return self
        peak = _largest_rate(learning_rate) if self.peak is None else self.peak
        copy = type(self)(**{**self.get_config(), "peak": peak})
        copy._rate = learning_rate
        return copy

    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, scalar float64."""
        return self._sparsity_of(_rate_at(self._rate, iteration))

    def _sparsity_of(self, rate: Any) -> tf.Tensor:
        rate = tf.cast(rate, tf.float64)
        share = tf.clip_by_value(rate / self.peak, 0.0, 1.0) ** self.exponent
        density = (1 - self.sparsity_at_peak) * share
        return 1 - tf.maximum(density, 1 - self.final_sparsity)

    @property
    def smallest(self) -> float:
        """The sparsity at the largest learning rate."""
        return self.sparsity_at_peak

    @property
    def final(self) -> float:
        """The largest sparsity."""
        return self.final_sparsity

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        rate = self.learning_rate
        return {
            "learning_rate": rate and keras.saving.serialize_keras_object(rate),
            "peak": self.peak,
            "sparsity_at_peak": self.sparsity_at_peak,
            "final_sparsity": self.final_sparsity,
            "exponent": self.exponent,
        }


def _rate_at(learning_rate: Any, iteration: tf.Tensor) -> Any:
    """Return a learning rate in a step, a scalar."""
    if learning_rate is None:
        raise ValueError(
            "`FollowLearningRate` has no learning rate to follow here. Pass the "
            "optimizer's schedule, `FollowLearningRate(schedule)`; only `DGCOptimizer` "
            "passes that of its inner optimizer."
        )
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        return learning_rate(iteration)
    if callable(learning_rate):
        return learning_rate()
    return tf.convert_to_tensor(learning_rate)


def _largest_rate(learning_rate: Any) -> float:
    """Return the largest value of a learning rate; raise `ValueError` if unknown."""
    rates = keras.optimizers.schedules
    kind = type(learning_rate)
    if not isinstance(learning_rate, rates.LearningRateSchedule):
        with tf.init_scope():
            return float(tf.convert_to_tensor(_rate_at(learning_rate, tf.constant(0))))
    if kind is rates.PiecewiseConstantDecay:
        return float(max(learning_rate.values))
    if kind is rates.PolynomialDecay:
        ends = learning_rate.initial_learning_rate, learning_rate.end_learning_rate
        return float(max(ends))
    if kind is rates.CosineDecay and learning_rate.warmup_target is not None:
        return float(learning_rate.warmup_target)
    falling = rates.CosineDecay, rates.CosineDecayRestarts
    if kind in (*falling, rates.ExponentialDecay, rates.InverseTimeDecay):
        return float(learning_rate.initial_learning_rate)
    raise ValueError(
        "`peak`, the largest learning rate, must be given to `FollowLearningRate`, as "
        f"it is not known of this schedule. Received: {show(learning_rate)}"
    )


def for_steps(steps: int) -> float:
    """Return the sparsity at which an entry is sent 15 times in a run, on average.

    An entry that is still unsent at the end of training never reaches the model. The
    sparsity is `1 - 15 / steps`, but at least 75 % and at most 99.9 %, which 15,000
    steps and more have.

    Args:
        steps: number of optimizer steps in the run, 1 or more; with
            `gradient_accumulation_steps` these are fewer than the steps of `fit`.
    """
    density = 15 / check_steps("steps", steps)
    return 1 - min(0.25, max(0.001, density))


@keras.saving.register_keras_serializable(package="tf_dgc")
class PiecewiseConstantPeriod(Schedule):
    """Number of local steps in a round, for `LocalOptimizer(period=...)`.

    `values[i]`, if the round begins with a step in `[boundaries[i-1], boundaries[i])`.

    Args:
        boundaries: ascending numbers of steps, one fewer than `values`.
        values: periods, whole numbers of steps, 1 or more.

    Raises:
        ValueError: for other lengths, order or values.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[int]):
        self.boundaries = _check_boundaries(boundaries, values)
        self.values = [check_period(v, "values") for v in values]

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the period, scalar int64."""
        values = tf.constant(self.values, tf.int64)
        return tf.gather(values, _stage_at(self.boundaries, step))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"boundaries": self.boundaries, "values": self.values}


def _check_boundaries(boundaries: Any, values: Any) -> list[int]:
    """Return boundaries as ints; raise `ValueError` unless they match the values."""
    numbers = _as_list(boundaries)
    valid = len(_as_list(values)) == len(numbers) + 1 and all(map(is_whole, numbers))
    if not valid or numbers != sorted(numbers) or min(numbers, default=0) < 0:
        negative = unknown_length(min(numbers, default=0)) if valid else ""
        raise ValueError(
            "`boundaries` must be whole, 0 or more, ascending, and one fewer than "
            f"`values`, which must be a sequence{negative}. "
            f"Received: boundaries={show(boundaries)}, values={show(values)}"
        )
    return [int(b) for b in numbers]


def _as_list(values: Any) -> list:
    """Return the elements of a sequence or array; an empty list for other values."""
    return list(values) if np.iterable(values) and not isinstance(values, str) else []


def _stage_at(boundaries: list[int], iteration: tf.Tensor) -> tf.Tensor:
    """Return how many boundaries an iteration has passed, scalar int32."""
    passed = tf.cast(iteration, tf.int64) >= tf.constant(boundaries, tf.int64)
    return tf.reduce_sum(tf.cast(passed, tf.int32))


# A sparsity is a float, or any callable of the iteration.


class ScheduledSparsity(NamedTuple):
    """A schedule's sparsity in one step."""

    current: tf.Tensor  # scalar float64
    minimum: float  # lower bound of the whole schedule


def get_sparsity(
    sparsity: Any, learning_rate: Any = None
) -> float | Callable[[tf.Tensor], tf.Tensor]:
    """Return a valid sparsity: a float in [0, 1), or a schedule.

    A `FollowLearningRate` without a learning rate of its own follows `learning_rate`.

    A schedule is any callable of the iteration. It is called here at iteration 0, so
    that errors are raised when the optimizer is created, traced once to compare the
    workers' schedules, and checked in every step.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(sparsity, dict):
        sparsity = keras.saving.deserialize_keras_object(sparsity)
    if isinstance(sparsity, FollowLearningRate) and learning_rate is not None:
        sparsity = sparsity.following(learning_rate)
    if not callable(sparsity):
        return check_sparsity(sparsity)
    _first_sparsity(sparsity)
    final_sparsity(sparsity)
    smallest_sparsity(sparsity)
    return sparsity


def sparsity_config(sparsity: float | Callable) -> Any:
    """Return a config from which `get_sparsity` creates the same sparsity."""
    if callable(sparsity):
        return keras.saving.serialize_keras_object(sparsity)
    return sparsity


def smallest_sparsity(sparsity: float | Callable) -> float:
    """Return a sparsity's lower bound; 0 for a schedule without `smallest`."""
    if callable(sparsity):
        return check_sparsity(getattr(sparsity, "smallest", 0.0), "smallest")
    return sparsity


def final_sparsity(sparsity: float | Callable) -> float:
    """Return the sparsity that a run reaches, for decisions before the first step.

    That is the schedule's attribute `final`, which functions may have too, and for
    other schedules the sparsity at iteration 0. Later iterations are not evaluated, as
    neither the run length nor the schedule's domain is known.
    """
    if not callable(sparsity):
        return sparsity
    final = getattr(sparsity, "final", None)
    if final is not None:
        return check_sparsity(final, "final")
    # Keras's schedules of learning rates have no `final`.
    schedule: Any = sparsity
    if type(schedule) is keras.optimizers.schedules.PiecewiseConstantDecay:
        final = schedule.values[-1]
    elif type(schedule) is keras.optimizers.schedules.PolynomialDecay:
        final = schedule.end_learning_rate
    # A run may end before a Keras schedule leaves [0, 1).
    return _first_sparsity(sparsity) if final is None or not 0 <= final < 1 else final


def _first_sparsity(schedule: Callable[[tf.Tensor], tf.Tensor]) -> float:
    """Return a schedule's sparsity at iteration 0, or raise `ValueError`."""
    with tf.init_scope():  # a step may be being traced
        value = schedule(tf.constant(0, tf.int64))
        # Values that are no numbers are rejected by the check.
        with contextlib.suppress(TypeError, ValueError):
            value = float(value)
    return check_sparsity(value, "sparsity(0)")


def sparsity_at(sparsity: float | Callable, iteration: tf.Tensor) -> float | tf.Tensor:
    """Return the sparsity of a step: a float, or a schedule's value, scalar float64."""
    return schedule_value(sparsity, iteration) if callable(sparsity) else sparsity


def sparsity_of_step(
    sparsity: float | Callable, iteration: tf.Tensor
) -> float | ScheduledSparsity:
    """Return the sparsity of a step, with a schedule's lower bound."""
    if not callable(sparsity):
        return sparsity
    return ScheduledSparsity(
        schedule_value(sparsity, iteration), smallest_sparsity(sparsity)
    )


_FLOAT32_ERROR = 1e-7  # of a sparsity


def schedule_value(
    schedule: Callable[[tf.Tensor], tf.Tensor], iteration: tf.Tensor
) -> tf.Tensor:
    """Evaluate a sparsity schedule in a training step, scalar float64.

    Raises:
        tf.errors.InvalidArgumentError: on all workers, if the value is NaN, 1 or more,
            or below the schedule's `smallest`, for which memory may be missing.
    """
    value, smallest = schedule(iteration), smallest_sparsity(schedule)
    # TensorFlow would round a Python float to float32.
    value = tf.convert_to_tensor(
        value, tf.float64 if isinstance(value, float) else None
    )
    if value.dtype != tf.float64:
        value = tf.cast(value, tf.float64)
        rounded = abs(value - smallest) < _FLOAT32_ERROR
        value = tf.where(rounded, tf.maximum(value, smallest), value)
    valid = tf.logical_and(value >= smallest, value < 1)
    check = tf.debugging.Assert(
        valid,
        [ASSERTION, f"The sparsity schedule must return a number in [{smallest:g}, 1), "
         "but returned", value, "at iteration", iteration],
    )  # fmt: skip
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(value)


# A period is an int, or any callable of the step with which a round begins.


def check_period(value: Any, name: str = "period") -> int:
    """Return a period as an int; raise `ValueError` unless it is whole, 1 or more."""
    unit = " of local steps in a round (1: synchronize in every step)"
    return check_steps(name, value, 1, unit)


def get_period(period: Any) -> int | Callable[[tf.Tensor], tf.Tensor]:
    """Return a valid period: an int, or a schedule.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(period, dict):
        period = keras.saving.deserialize_keras_object(period)
    if not callable(period):
        return check_period(period)
    first = period(tf.constant(0, tf.int64))
    # Values that are no numbers are rejected by the check.
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        first = tf.convert_to_tensor(first).numpy().item()
    check_period(first, "period(0)")
    return period


def period_at(schedule: Callable[[tf.Tensor], tf.Tensor], step: tf.Tensor) -> tf.Tensor:
    """Evaluate a schedule of the period in a training step, scalar int64.

    Raises:
        tf.errors.InvalidArgumentError: on all workers, for a period that is below 1 or
            not whole.
    """
    value = tf.convert_to_tensor(schedule(step))
    period = tf.cast(value, tf.int64)
    whole = tf.equal(tf.cast(period, value.dtype), value)
    check = tf.debugging.Assert(
        tf.logical_and(whole, period >= 1),
        [ASSERTION, "The schedule of the period must return a whole number, 1 or more, "
         "but returned", value, "at step", step],
    )  # fmt: skip
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(period)


# Fingerprints compare the schedules of several workers. The config of a function is its
# name, which other functions may have, and the iterations for which it is defined are
# unknown. So it is traced, and not called.

# Attributes of tables and variables that depend on the order of their creation.
_CREATION_ATTRIBUTES = ("container", "shared_name")


def schedule_fingerprint(schedule: Callable[[tf.Tensor], Any]) -> int:
    """Return a CRC-32 of the operations and constants of a schedule.

    Names of operations are left out, as they depend on earlier traces.

    Args:
        schedule: function of the iteration, a scalar int64 tensor.

    Returns:
        The CRC-32; 0 for a function that can be called but not traced.
    """

    def value(iteration: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(schedule(iteration))

    try:
        with tf.init_scope():
            traced = tf.function(value).get_concrete_function(
                tf.TensorSpec([], tf.int64)
            )
    except Exception:  # a user's function may raise anything when it is traced
        return 0
    graph = traced.graph.as_graph_def()
    functions = {f.signature.name: f.node_def for f in graph.library.function}
    return zlib.crc32(repr(_describe_nodes(graph.node, functions)).encode())


def _describe_nodes(nodes: Iterable[Any], functions: Mapping[str, Any]) -> list[tuple]:
    """Return each node's operation, attributes, and the indices of its inputs."""
    nodes = list(nodes)
    indices = {node.name: index for index, node in enumerate(nodes)}
    return [
        (
            node.op,
            [
                (name, _describe_attribute(node.attr[name], functions))
                for name in sorted(node.attr)
                if name[0] != "_" and name not in _CREATION_ATTRIBUTES
            ],
            [indices.get(name.lstrip("^").split(":")[0], -1) for name in node.input],
        )
        for node in nodes
    ]


def _describe_attribute(attribute: Any, functions: Mapping[str, Any]) -> Any:
    """Return an attribute's CRC-32, or the nodes of the functions that it names."""
    called = [attribute.func, *attribute.list.func]
    names = [function.name for function in called if function.name]
    if not names:
        return zlib.crc32(attribute.SerializeToString())
    # A recursive function is described once, and as empty within itself.
    others = {name: nodes for name, nodes in functions.items() if name not in names}
    return [_describe_nodes(functions.get(name, []), others) for name in names]
