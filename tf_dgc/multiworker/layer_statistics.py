"""Layer statistics, such as those of batch normalization, averaged over workers.

A batch normalization's moving mean and variance are not trained by gradients. Under a
strategy every replica updates its own from its own batches, so that they differ.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_trainer, tf_collectives
from tf_dgc.multiworker import consensus, failures


def average_statistics(model: keras.Model) -> None:
    """Average the statistics of the model's layers over all workers.

    Statistics are the moving means and variances of `keras.layers.BatchNormalization`,
    and all other floating point variables that a layer creates with `trainable=False`.
    Metrics, random streams, the states of recurrent layers, and variables with an
    `aggregation`, which a strategy keeps equal, are left out.

    Each replica is weighted by the number of examples that it has trained on since the
    last mean, by `fit` or `train_on_batch`. A replica without any contributes nothing.
    In a custom training loop nothing counts examples, so all replicas have the same
    weight; a replica whose values contain NaN or Inf, as those of a batch normalization
    do after an empty batch, is left out with a warning.

    In a prepared strategy, `fit` calls this at the end of every epoch, before
    validation and callbacks; `evaluate` before it begins; and `tf_dgc.saving` and the
    callbacks of `tf_dgc` before they save. In a custom training loop, call it before
    you evaluate or save, outside of `strategy.run` and on every worker: it is one
    collective of all.

    Args:
        model: Keras model, built in the scope of the strategy.

    Raises:
        RuntimeError: on every worker that calls it, if one does not within
            `TF_DGC_TIMEOUT` seconds.
    """
    if _statistics(model):
        consensus.wait_for_workers(
            model.distribute_strategy, "average the model's statistics"
        )
    average_statistics_of(model)


def average_statistics_of(model: keras.Model) -> None:
    """Average as `average_statistics`, without checking first that all workers come."""
    strategy = model.distribute_strategy
    variables = _statistics(model)
    if strategy.num_replicas_in_sync == 1 or not variables:
        return
    counts = _counts.get(model)
    if counts:
        examples = counts.local()
    else:
        examples = [tf.zeros([], tf.int64)] * len(strategy.extended.worker_devices)
    if consensus.is_multi_worker(strategy):
        with failures.naming_workers(strategy):
            _average(strategy, variables, examples)
    else:
        _average(strategy, variables, examples)
    if counts:
        counts.reset()


def count_examples(model: keras.Model) -> None:
    """Make this model instance count examples, and ignore empty batches."""
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return
    counts = _counts[model] = ExampleCounts(strategy)
    keras_trainer.wrap_steps(
        model, lambda stock: _count_in_step(model, counts, stock), _hide_empty_shape
    )


class ExampleCounts:
    """Numbers of examples that local replicas have trained on since the last mean."""

    def __init__(self, strategy: tf.distribute.Strategy):
        replicas = strategy.experimental_local_results(
            strategy.experimental_distribute_values_from_function(
                lambda context: context.replica_id_in_sync_group
            )
        )
        devices = strategy.extended.worker_devices
        self._variables = {
            int(replica): tf_collectives.local_variable(0, tf.int64, device)
            for replica, device in zip(replicas, devices, strict=True)
        }

    def add(self, number: tf.Tensor) -> None:
        """Add a number of examples of this replica; call it in replica context."""
        context = tf.distribute.get_replica_context()
        replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        self._variables[replica].assign_add(tf.cast(number, tf.int64))

    def local(self) -> list[tf.Tensor]:
        """Return the number of each local replica."""
        return [variable.read_value() for variable in self._variables.values()]

    def reset(self) -> None:
        """Set all numbers to 0."""
        for variable in self._variables.values():
            variable.assign(0)


_counts: weakref.WeakKeyDictionary[keras.Model, ExampleCounts] = (
    weakref.WeakKeyDictionary()
)


def _statistics(model: keras.Model) -> list[keras.Variable]:
    return [
        variable
        for variable in keras_trainer.non_trainable_variables(model)
        if variable.aggregation == "none" and tf.as_dtype(variable.dtype).is_floating
    ]


def _hide_empty_shape(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def test_step(data: Any) -> Any:
        return stock(keras_trainer.hide_empty_shape(data))

    return test_step


def _count_in_step(
    model: keras.Model, counts: ExampleCounts, stock: Callable
) -> Callable:
    @functools.wraps(stock)
    def train_step(data: Any) -> Any:
        data = keras_trainer.hide_empty_shape(data)
        variables = _statistics(model)
        first = keras_trainer.first_of_inputs(data)
        if not variables or first is None:
            return stock(data)
        examples = tf.shape(first)[0]
        before = [tf.convert_to_tensor(v.value) for v in variables]
        logs = stock(data)
        batch_norms = keras_trainer.variables_of_batch_normalizations(model)
        ids = {id(v) for v in batch_norms}
        _restore_if(
            tf.equal(examples, 0), variables, before, [id(v) in ids for v in variables]
        )
        counts.add(examples)
        return logs

    return train_step


def _restore_if(
    empty: tf.Tensor,
    variables: Sequence[keras.Variable],
    before: Sequence[tf.Tensor],
    always: Sequence[bool],
) -> None:
    """Restore statistics if a batch is empty (scalar bool); in replica context."""
    # `always`: even if the new value is finite. Values that do not depend on data, as
    # the vector of a spectral normalization, must stay equal on all replicas.

    def restore() -> tf.Tensor:
        for variable, old, restore_finite in zip(
            variables, before, always, strict=True
        ):
            new = tf.convert_to_tensor(variable.value)
            keep_new = not restore_finite and _is_finite(new)
            variable.assign(tf.where(keep_new, new, old))
        return tf.constant(True)

    tf.cond(empty, restore, lambda: tf.constant(False))


def _is_finite(value: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(value))


# Weight of a replica without examples. In double precision it vanishes next to that of
# one example, so it only matters if no replica has any.
_NO_EXAMPLES = 2.0**-200


def _average(
    strategy: tf.distribute.Strategy,
    variables: Sequence[keras.Variable],
    examples: Sequence[tf.Tensor],
) -> None:
    copies = [strategy.experimental_local_results(v.value) for v in variables]
    replicas = zip(*copies, strict=True)
    vectors = [
        _weighted(values, number)
        for values, number in zip(replicas, examples, strict=True)
    ]
    total = strategy.reduce("SUM", tf_collectives.per_replica(vectors), axis=None)
    sizes = [v.shape.num_elements() for v in variables]
    *sums, weights = tf.split(total, [*sizes, len(variables)])
    for i, (variable, sum_) in enumerate(zip(variables, sums, strict=True)):
        mean = tf.cast(sum_ / weights[i], variable.dtype)
        for copy in copies[i]:
            copy.assign(tf.reshape(mean, variable.shape))


def _weighted(values: Sequence[tf.Variable], examples: tf.Tensor) -> tf.Tensor:
    """Return a replica's statistics times their weights, followed by the weights."""
    has_examples = tf.greater(examples, 0)
    weight = tf.where(has_examples, tf.cast(examples, tf.float64), _NO_EXAMPLES)
    weights, scaled = [], []
    for value in values:
        flat = tf.reshape(tf.cast(value, tf.float64), [-1])
        included = tf.logical_or(has_examples, _is_finite(flat))
        weights.append(tf.where(included, weight, 0.0))
        scaled.append(tf.where(included, weight * flat, tf.zeros_like(flat)))
    _warn_about_excluded(weights)
    return tf.concat([*scaled, tf.stack(weights)], axis=0)


def _warn_about_excluded(weights: Sequence[tf.Tensor]) -> None:
    if tf.executing_eagerly() and any(float(weight) == 0.0 for weight in weights):
        warnings.warn(
            "Statistics of layers on this worker, such as the moving mean of a "
            "`BatchNormalization`, hold NaN or Inf, and are left out of the mean over "
            "workers. An empty batch makes them so: give every replica at least one "
            "example per step.",
            RuntimeWarning,
            stacklevel=2,
        )
