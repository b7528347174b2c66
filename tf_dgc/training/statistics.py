"""Statistics: what layers keep of the data they saw, averaged over workers.

A batch normalization's moving mean and variance are not trained by gradients. Under a
strategy every replica moves its own by its own batches, so that they differ.
"""

import contextlib

import keras
import tensorflow as tf

from tf_dgc._internals import mirrored, trainer
from tf_dgc.cluster import failures, meeting


def average_statistics(model: keras.Model) -> None:
    """Give all workers the mean of the statistics that the model's layers keep.

    These are the moving means and variances of `keras.layers.BatchNormalization`, and
    whatever else of floating point type a layer makes with `trainable=False`, but for
    metrics, random streams, the states of recurrent layers, and variables that a
    strategy keeps equal by itself (those with an `aggregation`). Frozen weights are
    equal anyway.

    On a prepared strategy `fit` does so at the end of every epoch, before validation
    and callbacks; `evaluate` before it begins; and `tf_dgc.saving` and the callbacks of
    `tf_dgc` before they save. In a loop of your own call it before you evaluate or
    save, outside of `strategy.run` and on every worker: it is one collective of all.

    Args:
        model: Keras model, built in the scope of the strategy.

    Raises:
        RuntimeError: on every worker that calls it, if one does not within
            `TF_DGC_TIMEOUT` seconds.
    """
    if _statistics(model):
        meeting.rendezvous(model.distribute_strategy, "average the model's statistics")
    average_now(model)


def average_now(model: keras.Model) -> None:
    """Do what `average_statistics` does, where all workers are known to come."""
    strategy = model.distribute_strategy
    variables = _statistics(model)
    if strategy.num_replicas_in_sync == 1 or not variables:
        return
    several = meeting.is_multi_worker(strategy)
    with failures.named(strategy) if several else contextlib.nullcontext():
        _average(strategy, variables)


def _statistics(model: keras.Model) -> list[keras.Variable]:
    return [
        variable
        for variable in trainer.non_trainable_variables(model)
        if variable.aggregation == "none" and tf.as_dtype(variable.dtype).is_floating
    ]


def _average(strategy: tf.distribute.Strategy, variables: list[keras.Variable]) -> None:
    copies = [strategy.experimental_local_results(v.value) for v in variables]
    dtypes = {tf.as_dtype(v.dtype) for v in variables}
    dtype = tf.float64 if tf.float64 in dtypes else tf.float32
    vectors = [
        tf.concat([tf.reshape(tf.cast(c, dtype), [-1]) for c in replica], axis=0)
        for replica in zip(*copies, strict=True)
    ]
    mean = strategy.reduce("MEAN", mirrored.per_replica(vectors), axis=None)
    parts = tf.split(mean, [v.shape.num_elements() for v in variables])
    for variable, replicas, part in zip(variables, copies, parts, strict=True):
        value = tf.reshape(tf.cast(part, variable.dtype), variable.shape)
        for copy in replicas:
            copy.assign(value)
