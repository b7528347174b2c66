"""What the scripts of workers in this folder have in common."""

import json
import os

import keras
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc.multiworker import cross_device

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STRATEGY = tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())


def data(number):
    """Return examples, the same on all workers, and their targets."""
    x = np.random.default_rng(0).normal(size=(number, 5)).astype("float32")
    return x, x.mean(axis=1, keepdims=True)


def make_model(make_optimizer, **settings):
    """Return a model whose optimizer is made in the strategy's scope."""
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(make_optimizer(), "mse", **settings)
    return model


def restored(make_model, path):
    """Return another model, with what a file has of one."""
    model = make_model()
    with STRATEGY.scope():
        model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


def own(variable):
    """Return this worker's value, whatever all agree on."""
    return STRATEGY.experimental_local_results(variable._value)[0].numpy().tolist()


def started():
    """Return how many collectives each group of workers has started, by its name."""
    hook = cross_device.cross_device_ops(STRATEGY)
    return {str(group): pair[0] for group, pair in hook.count().items()}


def write(directory, found):
    """Write this worker's findings."""
    (directory / f"{RANK}.json").write_text(json.dumps(found))
