"""Matching: of what `apply` is given, which gradient is of which variable."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import keras_optimizers
from tf_dgc.distribute.preparation import agree_while_tracing
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


class GradientCheck:
    """Compares between workers which variables have gradients, while a step is traced.

    A step's buffers have room for those variables only, so workers with different ones
    would wait for each other in different collectives.

    Args:
        strategy: strategy of the workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self._checked: set[tuple[int, ...]] = set()  # identities of the variables

    def check(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
    ) -> None:
        """Compare the variables that have gradients, unless they were compared before.

        Workers trace again at different times, as for a last batch that is smaller. So
        they meet only for variables that none of their steps had until then.

        Args:
            optimizer: optimizer whose step is traced.
            variables: variables that have gradients.

        Raises:
            ValueError: on all workers, if one has gradients for other variables.
            RuntimeError: if a worker does not come to be compared.
        """
        present = tuple(map(id, variables))
        if present in self._checked:
            return
        trained = keras_optimizers.trainable_variables(optimizer)

        def describe() -> dict[str, str]:
            # With its number, as paths of variables need not differ.
            return {
                f"{v.path} (variable {i})": "a gradient"
                if id(v) in present
                else "no gradient"
                for i, v in enumerate(trained)
            }

        agree_while_tracing(
            self._strategy,
            describe,
            _OTHER_GRADIENTS,
            f"compare which variables of {optimizer.name} have gradients",
        )
        self._checked.add(present)


_OTHER_GRADIENTS = (
    "The workers have gradients for different variables, so what they would exchange "
    "does not match. Compute the loss from the same layers on every worker: no branch "
    "that depends on the worker may leave some out. Where a worker has nothing to add, "
    "add the variable times zero to its loss, or pass zeros as the gradient."
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
