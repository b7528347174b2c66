"""What schedules have in common."""

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.arguments import is_whole, show, unknown_length


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
    given = as_list(boundaries)
    fit = len(as_list(values)) == len(given) + 1 and all(map(is_whole, given))
    if not fit or given != sorted(given) or min(given, default=0) < 0:
        negative = unknown_length(min(given, default=0)) if fit else ""
        raise ValueError(
            "`boundaries` must be whole, 0 or more, ascending, and one fewer than "
            f"`values`, a sequence too{negative}. "
            f"Received: boundaries={show(boundaries)}, values={show(values)}"
        )
    return [int(b) for b in given]


def as_list(values: Any) -> list:
    """Return what a sequence, or an array, holds; nothing for what is none."""
    return list(values) if np.iterable(values) and not isinstance(values, str) else []


def stage(schedule: Any, iteration: tf.Tensor) -> tf.Tensor:
    """Return how many of a schedule's boundaries an iteration has passed, int32."""
    boundaries = tf.constant(schedule.boundaries, tf.int64)
    passed = tf.cast(iteration, tf.int64) >= boundaries
    return tf.reduce_sum(tf.cast(passed, tf.int32))
