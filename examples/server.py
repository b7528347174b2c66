"""Digits with a parameter server, and one worker that is slower than the others.

    tf-dgc run --servers 1 --workers 3 examples/server.py --mode=ssp --staleness=3

No strategy: each worker trains a model of its own, by the server's weights. In mode
"sync" all take the time of the slow one, in "async" each takes its own; in "backup" the
first pushes of each step, `--quorum` of them, are enough.
"""

import json
import os
import time

import keras
import numpy as np
import reporting
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_dgc

MODES = ["sync", "async", "ssp", "backup"]
_MODE = flags.DEFINE_enum("mode", "ssp", MODES, "Who waits.")
_STALENESS = flags.DEFINE_integer("staleness", 3, "Steps that one may be ahead.")
_QUORUM = flags.DEFINE_integer("quorum", 2, "Pushes of a step, with backup.")
_STEPS = flags.DEFINE_integer("steps", 100, "Steps of each worker.")
_SLEEP = flags.DEFINE_float("sleep", 0.02, "Seconds that the last worker loses a step.")


class Slow(keras.callbacks.Callback):
    """Makes this worker slow."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(_SLEEP.value)


def load_data(worker, number):
    """Return what this worker trains with, every so many examples, and the test set."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)
    return x[worker::number], y[worker::number], x_test, y_test


def build_model():
    layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    numbers = {"ssp": {"staleness": _STALENESS.value}}
    numbers["backup"] = {"quorum": _QUORUM.value}
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        tf_dgc.ServerOptimizer(  # the one line
            sgd,
            _MODE.value,
            compressor=tf_dgc.compressors.TopK(0.99),
            **numbers.get(_MODE.value, {}),
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(_):
    config = json.loads(os.environ["TF_CONFIG"])
    worker, number = config["task"]["index"], len(config["cluster"]["worker"])
    model = build_model()
    x, y, x_test, y_test = load_data(worker, number)
    order = np.random.default_rng(worker).integers(len(x), size=(_STEPS.value, 32))
    slow = [Slow()] if worker == number - 1 else []
    start, chosen = time.perf_counter(), order.ravel()
    asked = {"shuffle": False, "verbose": reporting.bars(), "callbacks": slow}
    model.fit(x[chosen], y[chosen], 32, **asked)
    seconds = time.perf_counter() - start
    model.optimizer.pull_weights()
    accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
    stats = model.optimizer.stats
    print(
        f"worker {worker}: {_STEPS.value / seconds:.0f} steps per second, "
        f"a push is 1/{stats.ratio:.0f}, "
        f"{accuracy:.1%} right by the server's weights, of "
        f"{int(model.optimizer.iterations)} updates",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
