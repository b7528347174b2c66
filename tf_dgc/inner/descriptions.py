"""Descriptions of optimizers, and of what they hold, that need no config.

What trains in Keras need not have a config, which Keras requires only where it saves.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import keras

from tf_dgc._internals import keras_optimizers
from tf_dgc.schedules import comparing

Serialize: TypeAlias = Callable[[Any], Any]


def describe(value: Any) -> Any:
    """Return what Keras serializes a value to; its class, if it has no config.

    Of an optimizer it is the class and the arguments, of a learning-rate schedule the
    class and a checksum of its operations. A lambda is described without a warning.

    Args:
        value: argument of an optimizer, or an optimizer.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return keras.saving.serialize_keras_object(value)
    except Exception:  # whatever a user's class raises
        return {"class_name": type(value).__qualname__, "config": _config(value)}


def _config(value: Any) -> dict[str, Any]:
    if isinstance(value, keras.optimizers.Optimizer):
        arguments = keras_optimizers.arguments_of(value)
        return {name: describe(held) for name, held in arguments.items()}
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return {"checksum of its operations": comparing.fingerprint(value)}
    return {}
