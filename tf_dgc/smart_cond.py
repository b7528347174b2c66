"""Conditions and counts that are resolved at trace time where possible."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import tensorflow as tf

BoolOrTensor: TypeAlias = bool | tf.Tensor


def smart_cond(condition: BoolOrTensor, if_true: Callable, if_false: Callable) -> Any:
    """Call one of two functions: now if the condition is a bool, else by `tf.cond`."""
    if isinstance(condition, bool):
        return if_true() if condition else if_false()
    return tf.cond(condition, if_true, if_false)


def add_counts(counts: Iterable[int | tf.Tensor]) -> int | tf.Tensor:
    """Return the sum: an int if all counts are, else a scalar int64 tensor.

    TensorFlow would convert an int to the int32 of another count, and overflow.
    """
    counts = list(counts)
    if all(isinstance(count, int) for count in counts):
        return sum(counts)
    return tf.add_n([tf.cast(count, tf.int64) for count in counts])
