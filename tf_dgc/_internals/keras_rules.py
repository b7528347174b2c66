"""Slots, settings and update rules of Keras's optimizers; some names are private."""

import types
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals.keras_optimizers import behaves_as, variable_index


def count_age(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Make `update_step` count iterations since the optimizer's state was reset."""
    # Adam's bias corrections then use that age. Learning rate schedules and
    # accumulation still use all iterations (`_iterations`). The variable has no
    # aggregation.
    began = keras.Variable(
        0, dtype=optimizer._iterations.dtype, trainable=False, name="began"
    )
    optimizer._tf_dgc_began = began  # Keras tracks it by that
    stock = optimizer._backend_update_step

    def update_step(self: Any, grads: Any, variables: Any, learning_rate: Any) -> None:
        attributes = vars(self)  # assigned without Keras's tracking
        iterations = attributes["_iterations"]
        attributes["_iterations"] = tf.convert_to_tensor(iterations.value) - began.value
        try:
            stock(grads, variables, learning_rate)
        finally:
            attributes["_iterations"] = iterations

    optimizer._backend_update_step = types.MethodType(update_step, optimizer)
    return began


def counts_age(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the counters of an instance: its calls, and the age of its state."""
    # Its `iterations` are not a variable if it accumulates gradients.
    began = getattr(optimizer, "_tf_dgc_began", None)
    return [optimizer._iterations, *([] if began is None else [began])]


def _state_age(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return the iterations that `update_step` uses in this step."""
    began = getattr(optimizer, "_tf_dgc_began", None)
    if began is None:
        return optimizer.iterations
    calls = tf.convert_to_tensor(optimizer._iterations.value) - began.value
    return calls // (optimizer.gradient_accumulation_steps or 1)


def reset_state(optimizer: keras.optimizers.Optimizer) -> None:
    """Reset the age of the state; call it in replica context."""
    optimizer._tf_dgc_began.assign(optimizer._iterations.value)


def lists_of_slots(
    optimizer: keras.optimizers.Optimizer, number: int
) -> list[list[keras.Variable]]:
    """Return attributes that are lists of `number` variables, but Keras's own."""
    return [
        slots
        for name, slots in vars(optimizer).items()
        if isinstance(slots, list)
        and name not in ("_variables", "_trainable_variables")
        and len(slots) == number
        and all(isinstance(v, keras.Variable) for v in slots)
    ]


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
    """Return the rule's name in `custom_ops/cpu/rules.h`; None if not Keras's step."""
    return _name_among(_NAMES, optimizer)


def adam_name(optimizer: Any) -> str | None:
    """Return the name of the rule of Adam or a variant of it; None for others."""
    return _name_among(_ADAM_NAMES, optimizer)


def _name_among(
    names: Mapping[type, Callable[[Any], str]], optimizer: Any
) -> str | None:
    for kind, name in names.items():
        if behaves_as(optimizer, kind):
            return name(optimizer)
    return None


def rule_settings(optimizer: Any, rule: str) -> list[Any]:
    """Return the settings of the rule, which must be numbers."""
    return [getattr(optimizer, name) for name in _SETTINGS[rule.partition("_")[0]]]


def rule_slots(optimizer: Any, rule: str, variable: Any) -> list[keras.Variable]:
    """Return the optimizer's slots of a variable, in the rule's order."""
    index = variable_index(optimizer, variable)
    return [getattr(optimizer, name)[index] for name in _SLOTS[rule]]


def rule_numbers(optimizer: Any, rule: str, rate: Any) -> list[Any]:
    """Return the coefficients of a step, floats or float32 tensors, as in Keras."""
    if rule.startswith("sgd"):
        return [rate, optimizer.momentum]
    if rule.startswith("rmsprop"):
        rho, momentum = optimizer.rho, optimizer.momentum
        return [rho, 1 - rho, optimizer.epsilon, momentum]
    ops = keras.ops
    step = ops.cast(_state_age(optimizer) + 1, "float32")
    powers = [
        ops.power(ops.cast(beta, "float32"), step)
        for beta in (optimizer.beta_1, optimizer.beta_2)
    ]
    alpha = rate * ops.sqrt(1 - powers[1]) / (1 - powers[0])
    return [alpha, 1 - optimizer.beta_1, 1 - optimizer.beta_2, optimizer.epsilon]


def sgd_name(optimizer: Any) -> str:
    """Return the name of the rule of an `SGD`."""
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


# Updates of some rows of a variable


def has_row_rule(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a step changes no rows with gradient 0: SGD without momentum, Adagrad."""
    if behaves_as(optimizer, keras.optimizers.SGD):
        return not optimizer.momentum
    return behaves_as(optimizer, keras.optimizers.Adagrad)


def update_rows(
    optimizer: Any,
    variable: keras.Variable,
    ids: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> None:
    """Update rows as Keras does, bit for bit, for an optimizer with a row rule."""
    # `ids` are distinct, int32 `[r]`; `gradient` is `[r, width]`.
    shape = tf.stack([tf.size(ids), *variable.shape[1:]])
    gradient = tf.cast(tf.reshape(gradient, shape), variable.dtype)
    change = gradient * tf.cast(rate, gradient.dtype)
    if isinstance(optimizer, keras.optimizers.Adagrad):
        sums = optimizer._accumulators[variable_index(optimizer, variable)]
        _scatter(tf.raw_ops.ResourceScatterAdd, sums, ids, tf.square(gradient))
        change /= tf.sqrt(tf.gather(sums.value, ids) + optimizer.epsilon)
    _scatter(tf.raw_ops.ResourceScatterSub, variable, ids, change)


def _scatter(
    operation: Any, variable: keras.Variable, ids: tf.Tensor, values: tf.Tensor
) -> None:
    operation(resource=variable.value.handle, indices=ids, updates=values)
