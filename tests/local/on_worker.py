"""Helpers of the worker scripts in this folder."""

import json
import os

import keras
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc.multiworker import cross_device

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STRATEGY = tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())


def data(num_examples):
    """Return examples, equal on all workers, and their targets."""
    x = np.random.default_rng(0).normal(size=(num_examples, 5)).astype("float32")
    return x, x.mean(axis=1, keepdims=True)


def make_model(make_optimizer, **settings):
    """Return a model whose optimizer is created in the strategy's scope."""
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(make_optimizer(), "mse", **settings)
    return model


def restore_model(make_model, path):
    """Return a new model with the weights and optimizer state of a file."""
    model = make_model()
    with STRATEGY.scope():
        model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


def local_value(variable):
    """Return this worker's value, not the consensus."""
    return STRATEGY.experimental_local_results(variable._value)[0].numpy().tolist()


def started_collectives():
    """Return the number of started collectives by group of workers."""
    hook = cross_device.cross_device_ops(STRATEGY)
    return {str(group): pair[0] for group, pair in hook.count().items()}


def write(directory, results):
    """Write this worker's results."""
    (directory / f"{RANK}.json").write_text(json.dumps(results))
