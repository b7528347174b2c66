"""Private names of Keras's optimizers and their variables."""

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.optimizers import base_optimizer
from keras.src.utils import tracking
from tensorflow.python.distribute import values

from tf_dgc._internals import optimizer_copies
from tf_dgc.arguments import show

# Saving and loading

_SAVE_METHODS = ("save_own_variables", "load_own_variables")


def leave_out_of_files(optimizer: keras.optimizers.Optimizer) -> None:
    """Make Keras save nothing of this instance, because its owner does."""
    for name in _SAVE_METHODS:
        setattr(optimizer, name, lambda store: None)


def load_only_if(
    optimizer: keras.optimizers.Optimizer, condition: Callable[[], bool]
) -> None:
    """Make Keras load the state of this instance only if a condition holds."""
    load = optimizer.load_own_variables
    optimizer.load_own_variables = lambda store: load(store) if condition() else None


# Settings


def arguments_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return constructor arguments that are attributes, unserialized, by name."""
    arguments = {
        name: getattr(optimizer, name)
        for name in inspect.signature(type(optimizer)).parameters
        if name != "learning_rate" and hasattr(optimizer, name)
    }
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        with tf.init_scope():  # also while a step is traced
            rate = float(rate.numpy())
    return {"learning_rate": rate, **arguments}


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return the learning rate: a variable, a schedule or a callable."""
    return optimizer._learning_rate


def rate_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    """Return the variable of the learning rate; None if it is a schedule."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def behaves_as(
    optimizer: keras.optimizers.Optimizer, kind: type[keras.optimizers.Optimizer]
) -> bool:
    """Whether a step is that of `kind`, even if the class is a subclass."""
    # No attribute or argument of `kind` may be overridden in the subclass or on the
    # object, except its construction, how gradients are summed, and what this package
    # replaces.
    return isinstance(optimizer, kind) and not overridden(optimizer, kind)


def overridden(
    optimizer: keras.optimizers.Optimizer, kind: type[keras.optimizers.Optimizer]
) -> list[str]:
    """Return the names that keep `behaves_as` from being true."""
    subclasses = [c for c in type(optimizer).__mro__ if c not in kind.__mro__]
    by_user = optimizer_copies.replaced_methods(optimizer)
    on_object = optimizer_copies.methods_of_instance(optimizer)
    on_object -= _REPLACED_HERE - by_user
    replaced = on_object.union(*map(vars, subclasses))
    names = {*dir(kind), *inspect.signature(kind).parameters}
    return sorted(replaced & names - _MAY_DIFFER)


def clips_by_itself(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether class or object override `_clip_gradients` or `_clip_by_norm`."""
    kind, stock = type(optimizer), keras.optimizers.Optimizer
    names = {"_clip_gradients", "_clip_by_norm"}
    return any(getattr(kind, n) is not getattr(stock, n) for n in names) or bool(
        names & optimizer_copies.replaced_methods(optimizer)
    )


_MAY_DIFFER = {
    "_all_reduce_sum_gradients",
    *("__init__", "get_config", "from_config", "__doc__", "__module__"),
    *("__annotations__", "__firstlineno__", "__static_attributes__"),
}


# Variables


def share_iterations(
    optimizer: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer
) -> None:
    """Make `optimizer` use the iterations of `other`."""
    # The previous variable stays in `_variables`: TensorFlow cannot checkpoint a
    # tracked list from which something was removed.
    optimizer._unused_iterations = optimizer._iterations
    optimizer._iterations = other._iterations


class _WrappedVariable(keras.Variable):
    """A `tf.Variable` as a Keras variable, which shares its memory."""

    # Keras's optimizers accept both (`_initialize_with_initializer`, `_path`).

    def __init__(self, variable: tf.Variable):
        self._wrapped = variable
        name = variable.name.split(":")[0]
        super().__init__(
            initializer="zeros",  # not used
            shape=variable.shape,
            dtype=variable.dtype.name,
            trainable=variable.trainable,
            name=name.replace("/", "_"),
        )
        self._path = name

    def _initialize_with_initializer(self, initializer: Any) -> None:
        self._initialize(self._wrapped)


def as_keras_variable(variable: Any) -> keras.Variable:
    """Return a `tf.Variable` or `keras.Variable` as a `keras.Variable`."""
    if isinstance(variable, keras.Variable):
        return variable
    return _WrappedVariable(variable)


class _Scalar(_WrappedVariable):
    """A scalar variable that `float` and `int` accept under every strategy."""

    # `keras.Variable` converts its value, which variables of `tf.distribute` reject.

    def __init__(self, variable: keras.Variable):
        super().__init__(variable.value)
        self._path = variable.path

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())


def readable_scalar(value: Any) -> Any:
    """Return a learning rate, or iterations, that `float` and `int` accept."""
    is_variable = type(value) is keras.Variable
    if is_variable and isinstance(value.value, values.DistributedVariable):
        return _Scalar(value)
    return value


@tracking.no_automatic_dependency_tracking
def remember_variables(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """Build an optimizer, without moving averages (`Optimizer.build`)."""
    # Its indices count trained variables first, then those that gradients overwrite.
    trained_first = sorted(variables, key=overwrites_with_gradient)
    optimizer._trainable_variables_indices = {
        optimizer._var_key(v): i for i, v in enumerate(trained_first)
    }
    optimizer._trainable_variables = variables[:]
    optimizer.built = True


# Steps


def replace_all_reduce(
    optimizer: keras.optimizers.Optimizer, function: Callable[[Any], Any]
) -> None:
    """Replace the sum of `(gradient, variable)` pairs over replicas."""
    optimizer._all_reduce_sum_gradients = function


def step_alone(optimizer: keras.optimizers.Optimizer) -> None:
    """Make this instance step in replica context, without other replicas."""
    # Keras updates across replicas, which TensorFlow rejects within a condition of a
    # replica. All updated variables must have no aggregation, so that each replica has
    # its own copy; for the iterations, see `count_alone`.
    kind, stock = type(optimizer), base_optimizer.BaseOptimizer
    update = "_backend_update_step"
    by_user = optimizer_copies.replaced_methods(optimizer)
    overrides = [
        name
        for name in _ACROSS_REPLICAS
        if name in by_user
        or getattr(kind, name) is not getattr(keras.optimizers.Optimizer, name)
    ]
    if update in overrides:
        raise ValueError(
            "The inner optimizer must be able to step on one worker alone, and "
            f"`{kind.__name__}` overrides `{update}`, which involves the others. Pass "
            f"another optimizer, such as `Adam`. Received: {show(optimizer)}"
        )
    local_methods = {
        "_apply_weight_decay": _decay_alone,
        "_backend_update_step": _update_alone,
        _ACCUMULATE: getattr(stock, _ACCUMULATE),
    }
    for name in set(_ACROSS_REPLICAS) - set(overrides):
        setattr(optimizer, name, types.MethodType(local_methods[name], optimizer))


def _decay_alone(self: Any, variables: Any) -> None:
    """Replace `TFOptimizer._apply_weight_decay` on this replica alone."""
    if self.weight_decay is None:
        return
    for variable in map(_local_copy, variables):
        if self._use_weight_decay(variable):
            rate = tf.cast(self.learning_rate, variable.dtype)
            decay = tf.cast(self.weight_decay, variable.dtype)
            variable.assign_sub(variable * decay * rate)


def _update_alone(self: Any, grads: Any, variables: Any, learning_rate: Any) -> None:
    """Replace `TFOptimizer._backend_update_step` on this replica alone."""
    for gradient, variable in zip(grads, variables, strict=True):
        self.update_step(gradient, _local_copy(variable), learning_rate)


def _local_copy(variable: Any) -> tf.Variable:
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return value._get() if isinstance(value, values.DistributedVariable) else value


def count_alone(optimizer: keras.optimizers.Optimizer) -> None:
    """Make this instance count its iterations in a variable without aggregation."""
    optimizer._unused_iterations = optimizer._iterations
    optimizer._iterations = keras.Variable(
        0, dtype=optimizer._iterations.dtype, trainable=False, name="iteration"
    )


_ACCUMULATE = "_backend_increment_gradient_accumulators"
_ACROSS_REPLICAS = ("_apply_weight_decay", "_backend_update_step", _ACCUMULATE)


_REPLACED_HERE = {*_ACROSS_REPLICAS, *_SAVE_METHODS, "_get_current_learning_rate"}


def replace_update_step(
    optimizer: keras.optimizers.Optimizer, function: Callable[..., None]
) -> None:
    """Replace `update_step` of this instance."""
    optimizer.update_step = function


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """Make Keras track variables that become attributes of an optimizer."""
    # `LossScaleOptimizer.build` turns that off, also for the optimizer that it wraps,
    # whose variables would not be saved.
    before = tracking.is_tracking_enabled()
    global_state.set_global_attribute("tracking_on", True)
    try:
        yield
    finally:
        global_state.set_global_attribute("tracking_on", before)


def own_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that the optimizer tracks, without its inner optimizer's."""
    return [v for v in optimizer._variables if v is not optimizer._unused_iterations]


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the model variables the optimizer was built with."""
    return optimizer._trainable_variables


def drop_missing_gradients(
    optimizer: keras.optimizers.Optimizer, gradients: Any, variables: Any
) -> tuple[list[Any], list[Any]]:
    """Drop pairs whose gradient is None, with Keras's own warning."""
    return optimizer._filter_empty_gradients(gradients, variables)


def check_known(optimizer: keras.optimizers.Optimizer, variables: Any) -> None:
    """Raise `ValueError` for variables the optimizer was not built with."""
    optimizer._check_variables_are_known(variables)


def known_variables(
    optimizer: keras.optimizers.Optimizer, variables: Any
) -> list[keras.Variable]:
    """Return the objects that the optimizer was built with, equal on all replicas."""
    by_key = {optimizer._var_key(v): v for v in optimizer._trainable_variables}
    return [by_key[optimizer._var_key(v)] for v in variables]


def distinct_variables(
    optimizer: keras.optimizers.Optimizer, variables: Any
) -> list[keras.Variable]:
    """Return variables of Keras or TensorFlow, each once, as `keras.Variable`s."""
    by_key: dict[Any, keras.Variable] = {}
    for variable in map(as_keras_variable, variables):
        by_key.setdefault(optimizer._var_key(variable), variable)
    return list(by_key.values())


def variable_index(optimizer: keras.optimizers.Optimizer, variable: Any) -> int:
    """Return the position of `variable` among those the optimizer was built with."""
    return optimizer._get_variable_index(variable)


def uses_weight_decay(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether weight decay applies to the variable; the optimizer may be unbuilt."""
    # Since Keras 3.16, `_use_weight_decay` needs a built optimizer, and this does not.
    is_excluded = getattr(optimizer, "_is_excluded_from_weight_decay", None)
    if is_excluded is not None:
        return not is_excluded(variable)
    return optimizer._use_weight_decay(variable)


class CoupledDecay(keras.optimizers.Optimizer):
    """An optimizer that applies `weight_decay` in `update_step`."""

    def _apply_weight_decay(self, variables: Any) -> None:
        pass


def overwrites_with_gradient(variable: Any) -> bool:
    """Whether Keras overwrites the variable with its gradient (float8 scales)."""
    return getattr(variable, "overwrite_with_gradient", False)


# Learning rates and moving averages


def scale_rate(
    optimizer: keras.optimizers.Optimizer, factor: tf.Variable
) -> Callable[[], Any]:
    """Multiply the learning rate by a scalar, before build; return a function of it."""
    original = optimizer._learning_rate

    def rate() -> Any:
        if isinstance(original, keras.optimizers.schedules.LearningRateSchedule):
            return original(optimizer._iterations)
        return original

    def scaled() -> Any:
        value = tf.convert_to_tensor(rate())
        return value * tf.cast(factor, value.dtype)

    optimizer.learning_rate = scaled
    return rate


def count_rate_by_calls(
    optimizer: keras.optimizers.Optimizer, calls: Callable[[], tf.Tensor]
) -> None:
    """Evaluate a schedule at the number of calls instead of the number of steps."""
    # As a Keras optimizer that accumulates gradients itself: its `_iterations` count
    # calls.
    stock = optimizer._get_current_learning_rate

    def current(self: Any) -> Any:
        rate = self._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return rate(calls())
        return stock()

    optimizer._get_current_learning_rate = types.MethodType(current, optimizer)


def update_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """Update `use_ema`'s averages as Keras does in a call that only accumulates."""
    variables = optimizer._trainable_variables
    optimizer._update_model_variables_moving_average(variables)
    if every := optimizer.ema_overwrite_frequency:
        keras.ops.cond(
            (optimizer.iterations + 1) % every == 0,
            lambda: optimizer._overwrite_model_variables_with_average_value(variables),
            lambda: None,
        )
