"""Loss scaling with gradients that differ between replicas.

`LossScaleOptimizer` checks on every replica whether its gradients are finite and uses
the first replica's result, as if the gradients had been summed before.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def synchronize_loss_scale(strategy: tf.distribute.Strategy) -> None:
    """Make all replicas of a strategy skip a step if the gradients of one overflow."""
    # Otherwise an overflow would reach all weights, or one process would skip while
    # others wait. With a `LocalOptimizer` each replica scales, and skips, its own
    # gradients.
    stock_call = strategy.extended.call_for_each_replica

    def call_for_each_replica(
        fn: Callable, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return stock_call(_replace(fn), args, kwargs)

    strategy.extended.call_for_each_replica = call_for_each_replica


def _replace(fn: Any) -> Any:
    """Return what to call instead of a method of `LossScaleOptimizer`."""
    owner = getattr(fn, "__self__", None)
    if not isinstance(owner, keras.optimizers.LossScaleOptimizer):
        return fn
    if fn.__name__ == "check_finite":
        return _always_true if _steps_alone(owner) else _true_everywhere(fn)
    if _steps_alone(owner) and fn.__name__ == "_stateful_handle_finite_grads":
        return _scale_alone(owner, fn)
    return fn


def _steps_alone(owner: Any) -> bool:
    return getattr(owner.inner_optimizer, "steps_locally", False)


def _true_everywhere(check: Callable) -> Callable:
    def check_everywhere(*args: Any) -> tf.Tensor:
        fails = tf.cast(tf.logical_not(check(*args)), tf.float32)
        context = tf.distribute.get_replica_context()
        return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, fails), 0.0)

    return check_everywhere


def _always_true(*args: Any) -> tf.Tensor:
    del args
    return tf.constant(True)


def _scale_alone(owner: Any, step: Callable) -> Callable:
    """Return the step of one replica, which halves its own scale at an overflow."""
    # The inner optimizer is always called, because it counts calls; it ignores
    # gradients that are not finite.

    def step_and_scale(gradients: Any, variables: Any) -> None:
        finite = owner.check_finite(gradients)
        halved = tf.convert_to_tensor(owner.dynamic_scale.value) * 0.5
        step(gradients, variables)
        for variable, value_at_overflow in (
            (owner.dynamic_scale, halved),
            (owner.step_counter, tf.zeros([], owner.step_counter.dtype)),
        ):
            value = tf.convert_to_tensor(variable.value)
            variable.assign(tf.where(finite, value, value_at_overflow))

    return step_and_scale
