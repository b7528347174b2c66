"""Matching: of what `apply` is given, which gradient is of which variable."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import metrics
from tf_dgc._internals import keras_optimizers
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.packing import num_bytes
from tf_dgc.collectives.requests import AllGather
from tf_dgc.compressors.common.one_round import from_words, to_words
from tf_dgc.multiworker.strategy import require_equal_while_tracing
from tf_dgc.multiworker.worker_variables import PerWorkerVariable
from tf_dgc.optimizers import conditions
from tf_dgc.steps import accumulation


def match_gradients(
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


# --- Accumulating: the gradients of several calls, whose mean is one step's.


class GradientAccumulation:
    """Adds up what each worker's calls bring, as Keras's optimizers do.

    As there, the learning rate goes by calls, and weights are averaged in every call.
    Nobody is contacted before the last call of a step. What is not finite is in the
    sum, so that the step treats it as it treats such a gradient.

    Args:
        number: number of calls that make a step.
        tensors: descriptions of the tensors of the model.
        variables: variables of the model.

    Raises:
        ValueError: for variables that take their gradient as their new value.

    Attributes:
        sums: variable of each tensor, of this step's calls so far.
        calls: variable of how many these are, scalar int64, the same on all workers.
        total: variable of how many there were in all steps, likewise; the number that
            makes a step may be another one in a run that goes on from a file.
    """

    def __init__(
        self,
        number: int,
        tensors: Sequence[TensorSpec],
        variables: Sequence[keras.Variable],
    ):
        special = filter(keras_optimizers.overwrites_with_gradient, variables)
        if names := [v.path for v in special]:
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
        """All that is remembered from call to call."""
        return [*self.sums, self.calls, self.total]

    def set_rate(self, rule: keras.optimizers.Optimizer) -> None:
        """Let the learning rate be that of the call, as Keras has it.

        Args:
            rule: inner optimizer, whose iterations are steps.
        """
        keras_optimizers.count_rate_by_calls(
            rule, lambda: tf.convert_to_tensor(self.total.value)
        )

    def call(
        self,
        optimizer: Any,
        grads: Sequence[Any],
        variables: Sequence[keras.Variable],
        step: Callable[[list[tf.Tensor]], None],
    ) -> None:
        """Add gradients, and take the step if it is complete; in replica context.

        Args:
            optimizer: optimizer that was called, with an inner one.
            grads: gradients of the variables, none missing.
            variables: variables of the model.
            step: function of their means that takes the step.
        """
        places = [keras_optimizers.variable_index(optimizer, v) for v in variables]
        for place, gradient in zip(places, grads, strict=True):
            _add(self.sums[place], gradient)
        done = tf.convert_to_tensor(self.calls.value) + 1

        def complete() -> None:
            dtypes = [tf.as_dtype(v.dtype) for v in variables]
            step([self._take(*pair, done) for pair in zip(places, dtypes, strict=True)])

        ends = tf.greater_equal(done, self._number)
        conditions.cond_in_all_replicas(ends, complete)
        rule = optimizer.inner_optimizer
        if rule.use_ema:
            average = functools.partial(keras_optimizers.update_averages, rule)
            conditions.cond_in_all_replicas(tf.logical_not(ends), average)
        self.calls.assign(tf.where(ends, tf.zeros_like(done), done))
        self.total.assign_add(1)

    def _take(self, place: int, dtype: tf.DType, calls: tf.Tensor) -> tf.Tensor:
        """Return the mean of a tensor over so many calls, and begin anew."""
        kept = self.sums[place]
        total = kept.local()
        mean = tf.cast(total / tf.cast(calls, total.dtype), dtype)
        with tf.control_dependencies([mean]):
            kept.assign(tf.zeros(kept.shape, kept.dtype))
        return mean


def _add(kept: PerWorkerVariable, gradient: Any) -> None:
    """Add a gradient, of which rows may be given alone."""
    dtype = tf.as_dtype(kept.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        at = tf.cast(gradient.indices, tf.int64)[:, tf.newaxis]
        values = tf.cast(gradient.values, dtype)
        kept.assign(tf.tensor_scatter_nd_add(kept.local(), at, values))
    else:
        kept.assign(kept.local() + tf.cast(gradient, dtype))


# --- Overwrite: variables that take what comes as their gradient as their new value.
#
# Keras marks them by `overwrite_with_gradient`: scales and histories of float8 layers.

# How values of several workers, `[N, n]`, become one, by the variable's aggregation.
# Without one it is the largest, as in Keras over steps whose gradients accumulate.
_AGREE: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "none": lambda rows: tf.reduce_max(rows, axis=0),
    "mean": lambda rows: tf.reduce_mean(rows, axis=0),
    "sum": lambda rows: tf.reduce_sum(rows, axis=0),
    "only_first_replica": lambda rows: rows[0],
}


def split_overwritten(
    gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
) -> tuple[list[tuple], list[tuple]]:
    """Return pairs to train with, and pairs to overwrite."""
    trained: list[tuple] = []
    overwritten: list[tuple] = []
    for pair in zip(gradients, variables, strict=True):
        special = keras_optimizers.overwrites_with_gradient(pair[1])
        (overwritten if special else trained).append(pair)
    return trained, overwritten


def overwrite_variables(communicator: Communicator, pairs: Sequence[tuple]) -> int:
    """Assign what all workers agree on, in one collective; call it in replica context.

    An entry that is not finite on a worker counts there as the value that was.

    Args:
        communicator: communicator of the optimizer.
        pairs: new values and variables, each of the variable's shape.

    Returns:
        Bytes handed to the collective.
    """
    if not pairs:
        return 0
    wide = tf.float64 if any(v.dtype == "float64" for _, v in pairs) else tf.float32
    new, old = (
        tf.concat([tf.cast(tf.reshape(x, [-1]), wide) for x in column], axis=0)
        for column in ([g for g, _ in pairs], [v.value for _, v in pairs])
    )
    words = to_words(tf.where(tf.math.is_finite(new), new, old))
    gathered = communicator.answer(AllGather(words))
    rows = from_words(
        tf.reshape(gathered, [-1]), wide, [communicator.num_workers, new.shape[0]]
    )
    sizes = [v.shape.num_elements() for _, v in pairs]
    for (_, v), part in zip(pairs, tf.split(rows, sizes, axis=1), strict=True):
        value = tf.cast(tf.reshape(_AGREE[v.aggregation](part), v.shape), v.dtype)
        tf.raw_ops.AssignVariableOp(resource=v.value.handle, value=value)
    return num_bytes(words)
