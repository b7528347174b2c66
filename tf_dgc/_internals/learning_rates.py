"""Learning rates of Keras's optimizers: multiplied by a variable, or by calls."""

import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def scale_rate(
    optimizer: keras.optimizers.Optimizer, factor: tf.Variable
) -> Callable[[], Any]:
    """Multiply the learning rate; return a function of it as it was, a variable or not.

    Args:
        optimizer: optimizer, not yet built.
        factor: factor, a scalar.
    """
    given = optimizer._learning_rate

    def rate() -> Any:
        if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
            return given(optimizer._iterations)
        return given

    def scaled() -> Any:
        value = tf.convert_to_tensor(rate())
        return value * tf.cast(factor, value.dtype)

    optimizer.learning_rate = scaled
    return rate


def follow_calls(
    optimizer: keras.optimizers.Optimizer, calls: Callable[[], tf.Tensor]
) -> None:
    """Let a schedule go by calls, where this instance counts steps of several.

    So does that of an optimizer of Keras, which accumulates itself: its `_iterations`
    are calls, and a schedule is asked for these.

    Args:
        optimizer: optimizer, which does not accumulate.
        calls: function that returns the number of calls before this one, a scalar.
    """
    stock = optimizer._get_current_learning_rate

    def current(self: Any) -> Any:
        rate = self._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return rate(calls())
        return stock()

    optimizer._get_current_learning_rate = types.MethodType(current, optimizer)
