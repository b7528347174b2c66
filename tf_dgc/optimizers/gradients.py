"""Gradients on their way into a step: matched, compared, accumulated, overwriting."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import metrics
from tf_dgc._internals import keras_optimizers
from tf_dgc.codecs.bits import to_words
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.packing import num_bytes
from tf_dgc.collectives.requests import AllGather
from tf_dgc.compressors.common.one_round import from_words
from tf_dgc.multiworker.strategy import require_equal_while_tracing
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers import conditions
from tf_dgc.steps import accumulation


def match_gradients(
    optimizer: keras.optimizers.Optimizer, grads: Any, variables: Any
) -> tuple[list[Any], list[keras.Variable]]:
    """Pair gradients with variables; build the optimizer if it is not built.

    Args:
        optimizer: optimizer whose `apply` was called.
        grads: one gradient per variable: a tensor, `tf.IndexedSlices` or None.
        variables: variables in the same order; None for those of the first call.

    Returns:
        The gradients that are not None, and their variables; both empty if all
        gradients are None.

    Raises:
        ValueError: if numbers or shapes of gradients and variables differ, for
            variables that the optimizer was not built with, and without variables
            before it is built.
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
    grads, variables = keras_optimizers.drop_missing_gradients(
        optimizer, grads, variables
    )
    _check_shapes(grads, variables)
    return grads, variables


def add_repeated(
    gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> tuple[list[Any], list[keras.Variable]]:
    """Sum the gradients of each variable that was passed several times.

    Variables that their gradient overwrites are not summed.

    Returns:
        Gradients, and their variables, each once.
    """
    places: dict[Any, list[int]] = {}
    for place, variable in enumerate(variables):
        overwritten = keras_optimizers.overwrites_with_gradient(variable)
        key = place if overwritten else f"{id(variable)}"
        places.setdefault(key, []).append(place)
    firsts = [variables[indices[0]] for indices in places.values()]
    sums = [
        _sum_gradients([gradients[i] for i in indices], variable)
        for indices, variable in zip(places.values(), firsts, strict=True)
    ]
    return sums, firsts


def _sum_gradients(gradients: list[Any], variable: keras.Variable) -> Any:
    """Return the sum of a variable's gradients; sparse if all of them are."""
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
    """Compares which variables have gradients on the workers, while a step is traced.

    The buffers of a step hold only these variables. Workers with different ones would
    wait for each other in different collectives.

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

        Workers retrace at different times, for example for a smaller last batch. So
        they meet only for sets of variables that occur for the first time.

        Args:
            optimizer: optimizer whose step is traced.
            variables: variables that have gradients.

        Raises:
            ValueError: on all workers, if one has gradients for other variables.
            RuntimeError: if a worker does not take part in time.
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

        require_equal_while_tracing(
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


def _check_number(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raise `ValueError` if there is not one gradient per variable."""
    if len(gradients) != len(variables):
        raise ValueError(
            "There must be one gradient per variable. Received: "
            f"{len(gradients)} gradients for {len(variables)} variables"
        )


def _check_shapes(
    gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> None:
    """Raise `ValueError` if a gradient or its rows do not fit the variable's shape."""
    for gradient, variable in zip(gradients, variables, strict=True):
        received, shape = _shape_of(gradient), tuple(variable.shape)
        rows = isinstance(gradient, tf.IndexedSlices)
        if not received.is_compatible_with([None, *shape[1:]] if rows else shape):
            raise ValueError(
                f"The gradient of {variable.path} must have the shape of the variable, "
                f"{shape}. Received: {'rows' if rows else 'a gradient'} of shape "
                f"{tuple(received)}"
            )


def _shape_of(gradient: Any) -> tf.TensorShape:
    """Return the shape of a gradient, or of a sparse gradient's values."""
    values = getattr(gradient, "values", gradient)
    return tf.TensorShape(
        values.shape if hasattr(values, "shape") else np.shape(values)
    )


# --- Gradient accumulation ----------------------------------------------------------


class GradientAccumulation:
    """Sums each worker's gradients over several calls, like Keras's optimizers.

    As in Keras, the learning rate depends on the number of calls, and moving averages
    are updated in every call. Workers communicate only in the last call of a step. The
    sum contains gradients that are not finite; the step handles them as usual.

    Args:
        number: number of calls per step.
        tensors: descriptions of the tensors of the model.
        variables: variables of the model.

    Raises:
        ValueError: for variables that their gradient overwrites.

    Attributes:
        sums: variable of each tensor, the sum over this step's calls.
        calls: variable, number of this step's calls, scalar int64, equal on all
            workers.
        total: variable, number of calls of all steps, likewise. A restored run may have
            another number of calls per step.
    """

    def __init__(
        self,
        number: int,
        tensors: Sequence[TensorSpec],
        variables: Sequence[keras.Variable],
    ):
        overwritten = filter(keras_optimizers.overwrites_with_gradient, variables)
        if names := [v.path for v in overwritten]:
            raise ValueError(
                "Scales of float8 layers take a new value in every call, and "
                "`gradient_accumulation_steps` has a step of several. Leave one of "
                f"both out. Received: gradient_accumulation_steps={number}, {names}"
            )
        self._number = number
        self.sums = [
            PerWorkerVariable(t.shape, t.dtype.name, f"{i}_accumulated")
            for i, t in enumerate(tensors)
        ]
        self.calls = metrics.create_count("accumulated_calls")
        self.total = metrics.create_count("all_calls")

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables."""
        return [*self.sums, self.calls, self.total]

    def count_calls_for_learning_rate(self, inner: keras.optimizers.Optimizer) -> None:
        """Make the inner optimizer's learning rate depend on the number of calls."""
        keras_optimizers.count_rate_by_calls(
            inner, lambda: tf.convert_to_tensor(self.total.value)
        )

    def call(
        self,
        inner: keras.optimizers.Optimizer,
        indices: Sequence[int],
        grads: Sequence[Any],
        variables: Sequence[keras.Variable],
        step: Callable[[list[tf.Tensor]], None],
    ) -> None:
        """Add gradients, and take the step in its last call; in replica context.

        Args:
            inner: inner optimizer.
            indices: index of each variable among the tensors.
            grads: gradients of the variables, none missing.
            variables: variables of the model.
            step: function that takes the step with the mean gradients.
        """
        for index, gradient in zip(indices, grads, strict=True):
            _add(self.sums[index], gradient)
        calls = tf.convert_to_tensor(self.calls.value) + 1
        is_last = tf.greater_equal(calls, self._number)

        def take_step() -> None:
            step(
                [
                    self._mean_and_reset(index, tf.as_dtype(v.dtype), calls)
                    for index, v in zip(indices, variables, strict=True)
                ]
            )

        conditions.cond_in_all_replicas(is_last, take_step)
        if inner.use_ema:
            conditions.cond_in_all_replicas(
                tf.logical_not(is_last), lambda: keras_optimizers.update_averages(inner)
            )
        self.calls.assign(tf.where(is_last, tf.zeros_like(calls), calls))
        self.total.assign_add(1)

    def _mean_and_reset(
        self, index: int, dtype: tf.DType, calls: tf.Tensor
    ) -> tf.Tensor:
        variable = self.sums[index]
        total = variable.local()
        mean = tf.cast(total / tf.cast(calls, total.dtype), dtype)
        with tf.control_dependencies([mean]):
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        return mean


def _add(variable: PerWorkerVariable, gradient: Any) -> None:
    dtype = tf.as_dtype(variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.cast(gradient.indices, tf.int64)[:, tf.newaxis]
        values = tf.cast(gradient.values, dtype)
        variable.assign(tf.tensor_scatter_nd_add(variable.local(), rows, values))
    else:
        variable.assign(variable.local() + tf.cast(gradient, dtype))


# --- Variables that their gradient overwrites ----------------------------------------
#
# Keras marks them with `overwrite_with_gradient`: scales, histories of float8 layers.

# Combines the values of all workers, `[N, n]`, by the variable's aggregation. "none" is
# the largest value, as Keras combines values over accumulated gradients.
_AGGREGATIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "none": lambda rows: tf.reduce_max(rows, axis=0),
    "mean": lambda rows: tf.reduce_mean(rows, axis=0),
    "sum": lambda rows: tf.reduce_sum(rows, axis=0),
    "only_first_replica": lambda rows: rows[0],
}


def without_overwritten(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Return the variables that gradients do not overwrite."""
    overwritten = keras_optimizers.overwrites_with_gradient
    return [v for v in variables if not overwritten(v)]


def overwrite_variables(
    communicator: Communicator, grads: Sequence[Any], variables: Sequence[Any]
) -> tuple[list[Any], list[keras.Variable], int]:
    """Assign the new values of variables that gradients overwrite; in replica context.

    One collective exchanges them. Workers combine them as the variable's aggregation
    says. An entry that is not finite on a worker counts there as the former value.

    Returns:
        The other gradients, their variables, and the bytes passed to the collective.
    """
    pairs = list(zip(grads, variables, strict=True))
    overwritten = [p for p in pairs if keras_optimizers.overwrites_with_gradient(p[1])]
    if not overwritten:
        return list(grads), list(variables), 0
    trained = [p for p in pairs if not keras_optimizers.overwrites_with_gradient(p[1])]
    wide = any(v.dtype == "float64" for _, v in overwritten)
    dtype = tf.float64 if wide else tf.float32

    def flat(tensors: Sequence[Any]) -> tf.Tensor:
        flattened = [tf.cast(tf.reshape(t, [-1]), dtype) for t in tensors]
        return tf.concat(flattened, axis=0)

    new = flat([gradient for gradient, _ in overwritten])
    old = flat([v.value for _, v in overwritten])
    words = to_words(tf.where(tf.math.is_finite(new), new, old))
    gathered = communicator.answer(AllGather(words))
    rows = from_words(
        tf.reshape(gathered, [-1]), dtype, [communicator.num_workers, new.shape[0]]
    )
    sizes = [v.shape.num_elements() for _, v in overwritten]
    for (_, v), part in zip(overwritten, tf.split(rows, sizes, axis=1), strict=True):
        value = tf.reshape(_AGGREGATIONS[v.aggregation](part), v.shape)
        tf.raw_ops.AssignVariableOp(
            resource=v.value.handle, value=tf.cast(value, v.dtype)
        )
    return [g for g, _ in trained], [v for _, v in trained], num_bytes(words)
