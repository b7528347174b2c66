"""Worker script of test_packets.py, started once per worker by `tf-dgc run`.

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


class PacketCounter(keras.callbacks.Callback):
    """Reads the kernel's packet counter after each batch."""

    def __init__(self):
        super().__init__()
        self.packets = []

    def on_train_batch_end(self, batch, logs=None):
        self.packets.append(int(PACKETS.read_text()))


class StepTimer(keras.callbacks.Callback):
    """Records when each step ends, and pauses like steps of a larger model."""

    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.time())
        time.sleep(PAUSE)


def take_many_steps():
    """Return the end times of many local steps."""
    x = np.random.default_rng(0).normal(size=(BATCH * MANY_STEPS // EPOCHS, 5))
    y = x.mean(axis=1, keepdims=True)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        optimizer = tf_dgc.LocalOptimizer(keras.optimizers.SGD(0.1), LONG_PERIOD)
        model.compile(optimizer, "mse", metrics=["mae"])
    timer = StepTimer()
    model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[timer],
    )
    return timer.ends


def train(make_optimizer, use_dataset=False):
    """Return the packets of all steps but the first, in which the step is traced."""
    x = np.random.default_rng(0).normal(size=(BATCH * PERIOD * ROUNDS, 5))
    y = x.mean(axis=1, keepdims=True)
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(make_optimizer(), "mse", metrics=["mae"])
    counter = PacketCounter()
    data = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    if use_dataset:
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
        data = {"x": dataset, "steps_per_epoch": PERIOD * ROUNDS}
    model.fit(**data, verbose=0, callbacks=[counter])
    return np.diff(counter.packets).tolist()


def make_local_optimizer():
    return tf_dgc.LocalOptimizer(keras.optimizers.SGD(0.1), PERIOD)


def main(directory):
    """Train with local steps, and then with a synchronization in every step."""
    results = {
        "period": PERIOD,
        "rounds": ROUNDS,
        "local": train(make_local_optimizer),
        "data_set": train(make_local_optimizer, use_dataset=True),
        "scaled": train(
            lambda: keras.optimizers.LossScaleOptimizer(make_local_optimizer())
        ),
        "each": train(lambda: tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1))),
    }
    (directory / f"{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    if "many" in sys.argv:
        results = {"ends": take_many_steps()}
        (pathlib.Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(results))
    else:
        main(pathlib.Path(sys.argv[1]))
