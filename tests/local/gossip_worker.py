"""What the workers of test_gossip_workers.py do; started once per worker.

    python gossip_worker.py DIRECTORY

Writes its findings to DIRECTORY/RANK.json.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc.distribute import cross_device

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STRATEGY = tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())
PATH = [[0.75, 0.25, 0], [0.25, 0.5, 0.25], [0, 0.25, 0.75]]
X = np.random.default_rng(0).normal(size=(96, 5)).astype("float32")
Y = X.mean(axis=1, keepdims=True)


class Watched(keras.callbacks.Callback):
    """Records collectives by group, and this worker's weights, at each batch's end."""

    def __init__(self):
        super().__init__()
        self.started, self.weights = [], []

    def on_train_batch_end(self, batch, logs=None):
        hook = cross_device.cross_device_ops(STRATEGY)
        self.started.append({str(g): pair[0] for g, pair in hook.count().items()})
        self.weights.append(weights(self.model))


def weights(model):
    """Return this worker's own."""
    local = STRATEGY.experimental_local_results
    return [local(v._value)[0].numpy().tolist() for v in model.weights]


def train(directory, name, graph, **settings):
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        sgd = keras.optimizers.SGD(0.1)
        optimizer = tf_dgc.LocalOptimizer(sgd, 2, exchange=graph, **settings)
        model.compile(optimizer, "mse")
    watched = Watched()
    settings = {"batch_size": 24, "shuffle": False, "verbose": 0}
    model.fit(X, Y, callbacks=[watched], **settings)
    before, loss = weights(model), model.evaluate(X, Y, batch_size=24, verbose=0)
    path = directory / f"{name}.keras"
    model.save(path)
    saved = weights(keras.models.load_model(path, compile=False))
    unchanged = weights(model) == before
    model.optimizer.consensus()
    return {
        "started": watched.started,
        "weights": watched.weights,
        "loss": loss,
        "saved": saved,
        "unchanged": unchanged,
        "consensus": weights(model),
        "steps": model.optimizer.stats.steps,
    }


def main(directory):
    gossip = tf_dgc.exchanges.Gossip
    found = {
        "d-psgd": train(directory, "d-psgd", gossip(PATH)),
        "choco": train(
            directory, "choco", gossip(PATH, 0.5), compressor="uniform_8bit",
            min_compress_size=0,
        ),
        "one-peer": train(directory, "one-peer", gossip("exponential")),
    }  # fmt: skip
    (directory / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
