"""Decisions that are made while tracing if they can be, else while running."""

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

Choice: TypeAlias = bool | tf.Tensor


def choose(choice: Choice, if_true: Callable, if_false: Callable) -> Any:
    """Call one of two functions: now if `choice` is a bool, else by `tf.cond`."""
    if isinstance(choice, bool):
        return if_true() if choice else if_false()
    return tf.cond(choice, if_true, if_false)
