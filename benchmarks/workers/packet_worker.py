"""A worker of packets.py: counts the packets of each step in several loops.

Prints one line of JSON per loop, on the first worker.
"""

import json
import pathlib

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

STRATEGY = tf_dgc.multi_worker_strategy()
PACKETS = pathlib.Path("/sys/class/net/lo/statistics/tx_packets")
WARMUP, STEPS = 50, 400  # both multiples of 10
BATCH, SIZE = 8, 256


class PacketCounter(keras.callbacks.Callback):
    """Reads the kernel's packet counter after the first steps and at the end."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def on_train_batch_end(self, batch, logs=None):
        """Read the counter."""
        self.counts[batch + 1] = int(PACKETS.read_text())


def create_model(steps_per_execution=1):
    """Return a compiled model of three layers."""
    with STRATEGY.scope():
        layers = [keras.layers.Dense(SIZE, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((SIZE,)), *layers])
        optimizer = tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.01))
        model.compile(
            optimizer,
            "mse",
            metrics=["mae"],
            steps_per_execution=steps_per_execution,
        )
    return model


def create_dataset(is_infinite):
    """Return random batches, all different or one repeated."""
    batches = 1 if is_infinite else WARMUP + STEPS
    x = np.random.default_rng(0).normal(size=(batches * BATCH, SIZE)).astype("f4")
    dataset = tf.data.Dataset.from_tensor_slices((x, x)).batch(BATCH)
    return dataset.repeat() if is_infinite else dataset


def count_in_fit(is_infinite, steps_per_execution):
    """Return packets per step of all workers in `fit`."""
    counter = PacketCounter()
    create_model(steps_per_execution).fit(
        create_dataset(is_infinite),
        steps_per_epoch=WARMUP + STEPS if is_infinite else None,
        callbacks=[counter],
        verbose=0,
    )
    return (counter.counts[WARMUP + STEPS] - counter.counts[WARMUP]) / STEPS


def count_in_custom_loop(is_infinite):
    """Return packets per step of all workers in a loop over `strategy.run`."""
    model = create_model()
    dataset = STRATEGY.experimental_distribute_dataset(create_dataset(is_infinite))

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2) / STRATEGY.num_replicas_in_sync
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    run = tf.function(lambda batch: STRATEGY.run(step, [batch]))
    batches = iter(dataset)
    for _ in range(WARMUP):
        run(next(batches))
    before = int(PACKETS.read_text())
    for _ in range(STEPS):
        run(next(batches))
    return (int(PACKETS.read_text()) - before) / STEPS


def main():
    """Count in each loop, and print the rows."""
    is_first = STRATEGY.cluster_resolver.task_id == 0
    rows = []

    def add(loop, is_infinite, steps_per_execution, packets):
        rows.append(
            {
                "loop": loop,
                "dataset": "infinite" if is_infinite else "finite",
                "steps_per_execution": steps_per_execution,
                "packets_per_step": packets,
            }
        )

    for is_infinite in (True, False):
        add("custom", is_infinite, 1, count_in_custom_loop(is_infinite))
    for is_infinite in (False, True):
        for steps in (1, 10):
            add("fit", is_infinite, steps, count_in_fit(is_infinite, steps))
    if is_first:
        print("ROWS " + json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
