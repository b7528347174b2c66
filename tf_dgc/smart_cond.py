"""What is settled while tracing if it can be, else while running."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import tensorflow as tf

BoolOrTensor: TypeAlias = bool | tf.Tensor


def add_counts(counts: Iterable[int | tf.Tensor]) -> int | tf.Tensor:
    """Return the sum: an int if all are, else a scalar int64 tensor.

    TensorFlow would make int32 of an int beside an int32 tensor, and wrap around.
    """
    counts = list(counts)
    if all(isinstance(count, int) for count in counts):
        return sum(counts)
    return tf.add_n([tf.cast(count, tf.int64) for count in counts])


def smart_cond(choice: BoolOrTensor, if_true: Callable, if_false: Callable) -> Any:
    """Call one of two functions: now if `choice` is a bool, else by `tf.cond`."""
    if isinstance(choice, bool):
        return if_true() if choice else if_false()
    return tf.cond(choice, if_true, if_false)
