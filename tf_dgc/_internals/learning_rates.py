"""Learning rates of Keras's optimizers: one that is multiplied by a variable."""

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
