"""What the update of a Keras optimizer consists of; some of its names are private."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

from tf_dgc._internals.ages import age
from tf_dgc._internals.keras_optimizers import behaves_as, variable_index

_SLOTS = {
    "sgd": [],
    "sgd_momentum": ["momentums"],
    "sgd_nesterov": ["momentums"],
    "adam": ["_momentums", "_velocities"],
    "adam_amsgrad": ["_momentums", "_velocities", "_velocity_hats"],
    "adamax": ["_m", "_u"],
    "nadam": ["_momentums", "_velocities"],
    "rmsprop": ["_velocities"],
    "rmsprop_momentum": ["_velocities", "_momentums"],
    "rmsprop_centered": ["_velocities", "_average_gradients"],
    "rmsprop_centered_momentum": ["_velocities", "_average_gradients", "_momentums"],
}
_SETTINGS = {
    "sgd": ["momentum"],
    "adam": ["beta_1", "beta_2", "epsilon"],
    "rmsprop": ["rho", "epsilon", "momentum"],
}


def rule_name(optimizer: Any) -> str | None:
    """Return the name of the optimizer's rule; None if its step is not Keras's own.

    Names are those of `custom_ops/cpu/rules.h`.
    """
    return _name_among(_NAMES, optimizer)


def adam_name(optimizer: Any) -> str | None:
    """Return the same of Adam's kin, Adamax and Nadam too; None for others."""
    return _name_among(_ADAM_NAMES, optimizer)


def _name_among(
    names: Mapping[type, Callable[[Any], str]], optimizer: Any
) -> str | None:
    for kind, name in names.items():
        if behaves_as(optimizer, kind):
            return name(optimizer)
    return None


def rule_settings(optimizer: Any, rule: str) -> list[Any]:
    """Return the settings of the rule that are to be numbers."""
    return [getattr(optimizer, name) for name in _SETTINGS[rule.partition("_")[0]]]


def rule_slots(optimizer: Any, rule: str, variable: Any) -> list[keras.Variable]:
    """Return what the optimizer remembers of a variable, in the rule's order."""
    index = variable_index(optimizer, variable)
    return [getattr(optimizer, name)[index] for name in _SLOTS[rule]]


def rule_numbers(optimizer: Any, rule: str, rate: Any) -> list[Any]:
    """Return the rule's own numbers, floats or float32 tensors, as Keras has them.

    Args:
        optimizer: optimizer, in a step.
        rule: name of its rule.
        rate: learning rate, scalar float32.
    """
    if rule.startswith("sgd"):
        return [rate, optimizer.momentum]
    if rule.startswith("rmsprop"):
        rho, momentum = optimizer.rho, optimizer.momentum
        return [rho, 1 - rho, optimizer.epsilon, momentum]
    ops = keras.ops
    step = ops.cast(age(optimizer) + 1, "float32")
    powers = [
        ops.power(ops.cast(beta, "float32"), step)
        for beta in (optimizer.beta_1, optimizer.beta_2)
    ]
    alpha = rate * ops.sqrt(1 - powers[1]) / (1 - powers[0])
    return [alpha, 1 - optimizer.beta_1, 1 - optimizer.beta_2, optimizer.epsilon]


def sgd_name(optimizer: Any) -> str:
    """Return the name of the rule that an `SGD` has by its settings."""
    if not optimizer.momentum:
        return "sgd"
    return "sgd_nesterov" if optimizer.nesterov else "sgd_momentum"


def _adam_name(optimizer: Any) -> str:
    return "adam_amsgrad" if optimizer.amsgrad else "adam"


def _rmsprop_name(optimizer: Any) -> str:
    centered = "_centered" if optimizer.centered else ""
    momentum = "_momentum" if optimizer.momentum > 0 else ""
    return f"rmsprop{centered}{momentum}"


_ADAM_NAMES: dict[type, Callable[[Any], str]] = {
    keras.optimizers.Adam: _adam_name,
    keras.optimizers.AdamW: _adam_name,
    keras.optimizers.Adamax: lambda _: "adamax",
    keras.optimizers.Nadam: lambda _: "nadam",
}
_NAMES: dict[type, Callable[[Any], str]] = {
    keras.optimizers.SGD: sgd_name,
    keras.optimizers.Adam: _adam_name,
    keras.optimizers.AdamW: _adam_name,
    keras.optimizers.RMSprop: _rmsprop_name,
}
