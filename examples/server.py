"""Digits with a parameter server and one slow worker.

    tf-dgc run --servers 1 --workers 3 examples/server.py --mode=ssp --staleness=3

There is no strategy: each worker trains its own model with the server's weights. In
mode "sync" all workers wait for the slow one, in "async" none waits; in "backup" a step
waits only for the first `--quorum` pushes.
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
_MODE = flags.DEFINE_enum("mode", "ssp", MODES, "Mode of the server.")
_STALENESS = flags.DEFINE_integer("staleness", 3, "Largest lead of a worker in `ssp`.")
_QUORUM = flags.DEFINE_integer("quorum", 2, "Pushes of a step in `backup`.")
_STEPS = flags.DEFINE_integer("steps", 100, "Steps of each worker.")
_SLEEP = flags.DEFINE_float("sleep", 0.02, "Sleep of the last worker per step, in s.")


class Slow(keras.callbacks.Callback):
    """Slows this worker down."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(_SLEEP.value)


def load_data(worker, num_workers):
    """Return this worker's share of the training set, and the test set."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    x, x_test, y, y_test = train_test_split(images, labels, random_state=0)
    return x[worker::num_workers], y[worker::num_workers], x_test, y_test


def build_model():
    layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    mode_settings = {
        "ssp": {"staleness": _STALENESS.value},
        "backup": {"quorum": _QUORUM.value},
    }
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        tf_dgc.ServerOptimizer(  # the one line
            sgd,
            _MODE.value,
            compressor=tf_dgc.compressors.TopK(0.99),
            **mode_settings.get(_MODE.value, {}),
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(_):
    config = json.loads(os.environ["TF_CONFIG"])
    worker = config["task"]["index"]
    num_workers = len(config["cluster"]["worker"])
    model = build_model()
    x, y, x_test, y_test = load_data(worker, num_workers)
    order = np.random.default_rng(worker).integers(len(x), size=32 * _STEPS.value)
    start = time.perf_counter()
    model.fit(
        x[order],
        y[order],
        32,
        shuffle=False,
        verbose=reporting.verbose(),
        callbacks=[Slow()] if worker == num_workers - 1 else [],
    )
    seconds = time.perf_counter() - start
    model.optimizer.pull_weights()
    accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
    stats = model.optimizer.stats
    print(
        f"worker {worker}: {_STEPS.value / seconds:.0f} steps per second, "
        f"accuracy {accuracy:.1%} after {int(model.optimizer.iterations)} updates; "
        f"sent 1/{stats.ratio:.0f} of the gradient",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
