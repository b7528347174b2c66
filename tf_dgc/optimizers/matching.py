"""Matching: of what `apply` is given, which gradient is of which variable."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import keras_optimizers
from tf_dgc.steps import accumulation


def match(
    optimizer: keras.optimizers.Optimizer, grads: Any, variables: Any
) -> tuple[list, list]:
    """Build the optimizer if needed; return the gradients that exist, and variables.

    As in Keras, without any gradient nothing is done: none is returned.

    Args:
        optimizer: optimizer that was called.
        grads: one gradient per variable: a tensor, `tf.IndexedSlices` or None.
        variables: variables in the same order; None for those of the first call.

    Raises:
        ValueError: for another number of them, other shapes, variables that the
            optimizer was not built with, and none before it is built.
    """
    if len(grads) == 0:
        return [], []
    if variables is None:
        if not optimizer.built:
            raise ValueError(
                "Without variables, gradients are those of the variables that the "
                "optimizer is built for, and it is not yet built. Call "
                "`apply(grads, variables)`, or `optimizer.build(variables)` before. "
                f"Received: {len(grads)} gradients"
            )
        variables = keras_optimizers.trainable_variables(optimizer)
    variables = list(map(keras_optimizers.as_keras_variable, variables))
    _check_number(grads, variables)
    optimizer.build(variables)
    keras_optimizers.check_known(optimizer, variables)
    variables = keras_optimizers.known_variables(optimizer, variables)
    found = keras_optimizers.drop_missing_gradients(optimizer, grads, variables)
    _check_shapes(*found)
    return found


def add_repeated(
    gradients: Sequence, variables: Sequence[keras.Variable]
) -> tuple[list, list[keras.Variable]]:
    """Add up the gradients of each variable that is passed several times.

    Variables that take their gradient as their new value are left as they are.

    Args:
        gradients: gradients as `match` returns them.
        variables: variable of each, as `match` returns them.

    Returns:
        Gradients, and their variables, each once.
    """
    places: dict[Any, list[int]] = {}
    for place, variable in enumerate(variables):
        alone = keras_optimizers.overwrites_with_gradient(variable)
        places.setdefault(place if alone else f"{id(variable)}", []).append(place)
    firsts = [some[0] for some in places.values()]
    sums = [
        _add_up([gradients[place] for place in some], variables[some[0]])
        for some in places.values()
    ]
    return sums, [variables[place] for place in firsts]


def _add_up(gradients: list, variable: keras.Variable) -> Any:
    """Return the sum of gradients of a variable; sparse if all of them are."""
    if len(gradients) == 1:
        return gradients[0]
    if not all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return tf.add_n([accumulation.to_dense(g, variable) for g in gradients])
    indices = [tf.cast(tf.convert_to_tensor(g.indices), tf.int64) for g in gradients]
    values = [tf.cast(g.values, variable.dtype) for g in gradients]
    return tf.IndexedSlices(
        tf.concat(values, axis=0), tf.concat(indices, axis=0), variable.shape
    )


def _check_number(gradients: Sequence, variables: Sequence) -> None:
    """Raise `ValueError` unless there is one gradient per variable."""
    if len(gradients) != len(variables):
        raise ValueError(
            "There must be one gradient per variable. Received: "
            f"{len(gradients)} gradients for {len(variables)} variables"
        )


def _check_shapes(gradients: Sequence, variables: Sequence[keras.Variable]) -> None:
    """Raise `ValueError` unless gradients have their variables' shapes, or rows.

    Args:
        gradients: gradients, none missing: what a tensor can be made of, or
            `tf.IndexedSlices`.
        variables: variables of the model.
    """
    for gradient, variable in zip(gradients, variables, strict=True):
        given, shape = _shape_of(gradient), tuple(variable.shape)
        rows = isinstance(gradient, tf.IndexedSlices)
        if not given.is_compatible_with([None, *shape[1:]] if rows else shape):
            raise ValueError(
                f"The gradient of {variable.path} must have the shape of the variable, "
                f"{shape}. Received: {'rows' if rows else 'a gradient'} of shape "
                f"{tuple(given)}"
            )


def _shape_of(gradient: Any) -> tf.TensorShape:
    """Return the shape of a gradient, or of the values of a sparse one."""
    values = getattr(gradient, "values", gradient)
    return tf.TensorShape(
        values.shape if hasattr(values, "shape") else np.shape(values)
    )
