"""What the workers of test_packets.py do; started once per worker, by `tf-dgc run`.

    tf-dgc run --workers 2 packet_worker.py DIRECTORY [many]

Writes the packets of each step, of all workers together, to DIRECTORY/RANK.json; with
`many` the times at which a thousand local steps end instead.
"""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STRATEGY = tf_dgc.multi_worker_strategy()
PACKETS = pathlib.Path("/sys/class/net/lo/statistics/tx_packets")
PERIOD, ROUNDS = 20, 4
BATCH = 12
MANY_STEPS, EPOCHS, LONG_PERIOD = 1000, 2, 250
PAUSE = 0.01  # seconds after each of many steps


class Counted(keras.callbacks.Callback):
    """Reads the counter at the end of each batch."""

    def __init__(self):
        super().__init__()
        self.packets = []

    def on_train_batch_end(self, batch, logs=None):
        self.packets.append(int(PACKETS.read_text()))


class Timed(keras.callbacks.Callback):
    """Notes when each step ends, and pauses, as steps of a larger model take longer."""

    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.time())
        time.sleep(PAUSE)


def take_many_steps():
    """Return when each of many local steps ended."""
    x = np.random.default_rng(0).normal(size=(BATCH * MANY_STEPS // EPOCHS, 5))
    y = x.mean(axis=1, keepdims=True)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        optimizer = tf_dgc.LocalOptimizer(keras.optimizers.SGD(0.1), LONG_PERIOD)
        model.compile(optimizer, "mse", metrics=["mae"])
    timed = Timed()
    model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[timed],
    )
    return timed.ends


def train(make_optimizer, of_data_set=False):
    """Return the packets of all steps but the first, which is traced."""
    x = np.random.default_rng(0).normal(size=(BATCH * PERIOD * ROUNDS, 5))
    y = x.mean(axis=1, keepdims=True)
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(make_optimizer(), "mse", metrics=["mae"])
    counted = Counted()
    data = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    if of_data_set:
        repeated = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
        data = {"x": repeated, "steps_per_epoch": PERIOD * ROUNDS}
    model.fit(**data, verbose=0, callbacks=[counted])
    return np.diff(counted.packets).tolist()


def local():
    return tf_dgc.LocalOptimizer(keras.optimizers.SGD(0.1), PERIOD)


def main(directory):
    """Train by local steps, and then with an exchange in every step."""
    found = {
        "period": PERIOD,
        "rounds": ROUNDS,
        "local": train(local),
        "data_set": train(local, of_data_set=True),
        "scaled": train(lambda: keras.optimizers.LossScaleOptimizer(local())),
        "each": train(lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1))),
    }
    (directory / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if "many" in sys.argv:
        found = {"ends": take_many_steps()}
        (pathlib.Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(found))
    else:
        main(pathlib.Path(sys.argv[1]))
