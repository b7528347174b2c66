"""Schedules of the sparsity."""

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
    check_sparsity,
    check_steps,
    is_whole,
    show,
    unknown_length,
)

__all__ = [
    "PiecewiseConstantPeriod",
    "PiecewiseConstantSparsity",
    "SparsitySchedule",
    "WarmupSparsity",
    "for_steps",
]

# --- What schedules have in common.


class Schedule(abc.ABC):
    """A number by iteration, with a config."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Build a schedule from `get_config`'s dictionary."""
        return cls(**config)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={show(v)}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


def check_boundaries(boundaries: Sequence[int], values: Sequence) -> list[int]:
    """Return boundaries as ints; raise `ValueError` unless they fit the values."""
    given = boundary_list(boundaries)
    fit = len(boundary_list(values)) == len(given) + 1 and all(map(is_whole, given))
    if not fit or given != sorted(given) or min(given, default=0) < 0:
        negative = unknown_length(min(given, default=0)) if fit else ""
        raise ValueError(
            "`boundaries` must be whole, 0 or more, ascending, and one fewer than "
            f"`values`, a sequence too{negative}. "
            f"Received: boundaries={show(boundaries)}, values={show(values)}"
        )
    return [int(b) for b in given]


def boundary_list(values: Any) -> list:
    """Return what a sequence, or an array, holds; nothing for what is none."""
    return list(values) if np.iterable(values) and not isinstance(values, str) else []


def stage_at(schedule: Any, iteration: tf.Tensor) -> tf.Tensor:
    """Return how many of a schedule's boundaries an iteration has passed, int32."""
    boundaries = tf.constant(schedule.boundaries, tf.int64)
    passed = tf.cast(iteration, tf.int64) >= boundaries
    return tf.reduce_sum(tf.cast(passed, tf.int32))


class SparsitySchedule(Schedule):
    """Sparsity by iteration, in the manner of Keras learning-rate schedules.

    Subclasses implement `__call__` and `get_config`, and are made loadable with
    `keras.saving.register_keras_serializable`.
    """

    @abc.abstractmethod
    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, a scalar in [0, 1), at a scalar integer iteration."""

    @property
    def smallest(self) -> float:
        """The least sparsity there may be.

        XLA makes room for as many entries. A step that goes dense at none is traced
        without that, and takes no longer than by a number. At a value below it the
        step ends with an error.
        """
        return 0.0

    @property
    def final(self) -> float | None:
        """The sparsity it comes to; None for what it begins with.

        By it follows how much of an Adam's momentum is left beside waiting, and what
        `exchange="auto"` chooses.
        """
        return None


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
        self.boundaries = check_boundaries(boundaries, values)
        self.values = [check_sparsity(v, "values") for v in values]

    def __call__(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the sparsity, scalar float64."""
        return tf.gather(
            tf.constant(self.values, tf.float64), stage_at(self, iteration)
        )

    @property
    def smallest(self) -> float:
        """The least of `values`."""
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
        there = len(boundary_list(stages)) > 0
        if not is_whole(warmup_steps) or warmup_steps < 1 or not there:
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


def for_steps(steps: int) -> float:
    """Return the sparsity by which an entry is sent 15 times in a run, on average.

    What is not sent in time never reaches the model. It is `1 - 15 / steps`, 75 % at
    the least and 99.9 %, that of 15,000 steps and more, at the most.

    Args:
        steps: number of steps of the optimizer in which a model is trained, 1 or more;
            with `gradient_accumulation_steps` those are fewer than those of `fit`.
    """
    density = 15 / check_steps("steps", steps)
    return 1 - min(0.25, max(0.001, density))


# --- Asking: a sparsity that may be a number or any callable of the iteration.

_ROUNDED = 1e-7  # that a float32 may be off


class ScheduledSparsity(NamedTuple):
    """What a schedule says of a step.

    Attributes:
        now: sparsity of the step, scalar float64.
        least: the least that it ever is.
    """

    now: tf.Tensor
    least: float


def get_sparsity(sparsity: Any) -> float | Callable[[tf.Tensor], tf.Tensor]:
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
    first_sparsity(sparsity)
    final_sparsity(sparsity)
    smallest_sparsity(sparsity)
    return sparsity


def sparsity_config(sparsity: float | Callable) -> Any:
    """Return what `get` makes the same sparsity of, for a config."""
    if callable(sparsity):
        return keras.saving.serialize_keras_object(sparsity)
    return sparsity


def smallest_sparsity(sparsity: float | Callable) -> float:
    """Return the least that a sparsity may be; 0 if a schedule does not say."""
    if callable(sparsity):
        return check_sparsity(getattr(sparsity, "smallest", 0.0), "smallest")
    return sparsity


def final_sparsity(sparsity: float | Callable) -> float:
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
    return first_sparsity(sparsity) if end is None or not 0 <= end < 1 else end


# Of learning rates, which do not say it themselves.
_ENDS: dict[type, Callable[[Any], float]] = {
    keras.optimizers.schedules.PiecewiseConstantDecay: lambda given: given.values[-1],
    keras.optimizers.schedules.PolynomialDecay: lambda given: given.end_learning_rate,
}


def first_sparsity(schedule: Callable[[tf.Tensor], tf.Tensor]) -> float:
    """Return what a schedule begins with, or raise `ValueError` as for a number."""
    with tf.init_scope():  # while a step may be traced
        value = schedule(tf.constant(0, tf.int64))
        # What is no number is refused as it is.
        with contextlib.suppress(TypeError, ValueError):
            value = float(value)
    return check_sparsity(value, "sparsity(0)")


def sparsity_at(sparsity: float | Callable, iteration: tf.Tensor) -> float | tf.Tensor:
    """Return the sparsity of this step: the float, or the schedule's value now."""
    return schedule_value(sparsity, iteration) if callable(sparsity) else sparsity


def sparsity_of_step(
    sparsity: float | Callable, iteration: tf.Tensor
) -> float | ScheduledSparsity:
    """Return the sparsity of a step: the float, or what the schedule says of it."""
    if not callable(sparsity):
        return sparsity
    return ScheduledSparsity(
        schedule_value(sparsity, iteration), smallest_sparsity(sparsity)
    )


def schedule_value(
    schedule: Callable[[tf.Tensor], tf.Tensor], iteration: tf.Tensor
) -> tf.Tensor:
    """Evaluate a schedule inside a training step, refusing values outside [0, 1).

    And those below what it says is its least, for which there may be no room.

    Raises:
        tf.errors.InvalidArgumentError: on every worker alike, at the iteration where
            the schedule returns such a value or NaN.
    """
    value, least = schedule(iteration), smallest_sparsity(schedule)
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


# --- Schedules of the period: local steps from one exchange to the next.


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
        return tf.gather(tf.constant(self.values, tf.int64), stage_at(self, step))

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


# --- Comparing: whether schedules of several workers are the same.
#
# The config of a function is its name, and there may be others of that name. At which
# iterations it has an answer only the user knows, so it is traced, and asked for none.

_NAMES = "container", "shared_name"  # of tables and variables, as they were made


def schedule_fingerprint(schedule: Callable[[tf.Tensor], Any]) -> int:
    """Return a CRC-32 of the operations and constants that a schedule is made of.

    Not of their names, which depend on what was traced before.

    Args:
        schedule: function of the iteration, a scalar int64 tensor.

    Returns:
        The number; 0 if it cannot be traced, but only be called.
    """

    def asked(iteration: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(schedule(iteration))

    try:
        with tf.init_scope():
            traced = tf.function(asked).get_concrete_function(
                tf.TensorSpec([], tf.int64)
            )
    except Exception:  # whatever a user's function raises where it is not eager
        return 0
    graph = traced.graph.as_graph_def()
    functions = {f.signature.name: f.node_def for f in graph.library.function}
    return zlib.crc32(repr(_describe(graph.node, functions)).encode())


def _describe(nodes: Iterable[Any], functions: Mapping[str, Any]) -> list[tuple]:
    """Return of each node its operation, attributes, and the places of its inputs."""
    nodes = list(nodes)
    places = {node.name: place for place, node in enumerate(nodes)}
    return [
        (
            node.op,
            [(n, _value(node.attr[n], functions)) for n in _compared(node)],
            [places.get(name.lstrip("^").split(":")[0], -1) for name in node.input],
        )
        for node in nodes
    ]


def _compared(node: Any) -> list[str]:
    """Return the attributes of a node that say what it does, sorted."""
    return sorted(n for n in node.attr if n[0] != "_" and n not in _NAMES)


def _value(attribute: Any, functions: Mapping[str, Any]) -> Any:
    """Return what an attribute is, of functions what they do."""
    called = [attribute.func, *attribute.list.func]
    names = [function.name for function in called if function.name]
    if not names:
        return zlib.crc32(attribute.SerializeToString())
    # One that calls itself is described once, and as nothing within.
    rest = {name: nodes for name, nodes in functions.items() if name not in names}
    return [_describe(functions.get(name, []), rest) for name in names]
