"""From Adam's own steps to corrected ones, where a schedule first leaves something out.

What the optimizer and the workers remember of gradients becomes what they would
remember of updates: in this step, and never again. So it is of all tensors, also of
those without a gradient in this step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.steps.accumulation import prepare
from tf_dgc.steps.base import Inputs
from tf_dgc.steps.memory import Memory
from tf_dgc.transforms import preconditioning
from tf_dgc.transforms.preconditioning import Divisor


def cross(
    first: tf.Tensor,
    inputs: Inputs,
    memory: Memory,
    slots: Mapping[int, Sequence[keras.Variable]],
    divisors: Mapping[int, Divisor],
    beta_1: float,
    momentum: float,
) -> None:
    """Take over from the optimizer, before the step, if it is the first one.

    The second moment becomes Adam's; the velocity this worker's share of Adam's
    momentum, and the residual what it was, both divided as the step's gradient is, or
    would be if it was not missing. What the momentum still owes, and would not give
    with the smaller coefficient from now on, is added to the residual.

    Args:
        first: whether it is, scalar bool.
        inputs: inputs of the step, without divisors.
        memory: memory of all tensors, of the step or not.
        slots: Adam's momentum and second moment of each tensor with a divisor, by its
            place; behind them what else it remembers, the largest second moment so far.
        divisors: divisor of each tensor that has one, by its place.
        beta_1: coefficient of Adam's momentum.
        momentum: coefficient of the momentum from now on.
    """
    owed = beta_1 / (1 - beta_1) - momentum / (1 - momentum)

    def take_over() -> tf.Tensor:
        gradients, _ = prepare(inputs.tensors, inputs.gradients, inputs.scales)
        given = dict(zip(inputs.indices, gradients, strict=True))
        for i, by in divisors.items():
            dtype = memory.tensors[i].dtype
            total, *moments = (_flat(slot, dtype) for slot in slots[i])
            # Keras's own overflow, and what is infinite would stay.
            share = _finite(total, 0.0) / inputs.num_workers
            now = _take_moments(by, given.get(i), moments)
            kept = memory.residual[i]
            _divide(kept, _flat(kept, dtype) + owed * share, now, by, momentum)
            if memory.velocity:
                _divide(memory.velocity[i], share, now, by, momentum)
        return tf.constant(True)

    tf.cond(first, take_over, lambda: tf.constant(True))


def _take_moments(
    by: Divisor, gradient: tf.Tensor | None, moments: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Take over Adam's moments; return what the step's gradient is divided by.

    A moment that no gradient enters stays what it is, as in Keras.
    """
    moments = [_finite(moment, moment.dtype.max) for moment in moments]
    by.moment.assign(tf.reshape(moments[0], by.moment.shape))
    now = moments[0]
    if gradient is not None:
        now = preconditioning.follow(now, gradient, by.numbers, by.infinity)
    if by.largest is None:
        return now
    by.largest.assign(tf.reshape(moments[1], by.largest.shape))
    return tf.maximum(moments[1], now)


def _divide(
    kept: Any, values: tf.Tensor, now: tf.Tensor, by: Divisor, momentum: float
) -> None:
    rescaled = preconditioning.rescale(values, now, by.numbers, by.infinity)
    divided = rescaled * (1 / (1 - momentum))
    largest = now.dtype.max  # what overflows would never leave again
    within = tf.clip_by_value(divided, -largest, largest)
    kept.assign(tf.reshape(within, kept.shape))


def _flat(variable: keras.Variable, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.reshape(tf.convert_to_tensor(variable.value), [-1]), dtype)


def _finite(values: tf.Tensor, otherwise: float) -> tf.Tensor:
    return tf.where(
        tf.math.is_finite(values), values, tf.constant(otherwise, values.dtype)
    )
