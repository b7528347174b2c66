"""Updates of some rows of a variable alone, with the bits of Keras's own."""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals.keras_optimizers import behaves_as, variable_index


def knows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a step of the optimizer leaves rows as they are whose gradient is 0.

    That is plain descent, and Adagrad; weight decay apart.
    """
    if behaves_as(optimizer, keras.optimizers.SGD):
        return not optimizer.momentum
    return behaves_as(optimizer, keras.optimizers.Adagrad)


def update(
    optimizer: Any,
    variable: keras.Variable,
    ids: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> None:
    """Update rows by the rule of an optimizer that `knows` allows.

    Args:
        optimizer: optimizer, built.
        variable: variable of which they are rows.
        ids: ids of the rows, distinct, int32 `[r]`.
        gradient: gradient of the rows, `[r, width]`.
        rate: learning rate, a scalar.
    """
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
