"""Trains a small model on synthetic data; the other files here start it on clusters.

    tf-dgc run --workers 2 examples/cluster/train.py

A restarted run resumes from its backup. `TF_CONFIG`, or else Slurm, describes the
cluster.
"""

import os

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import tf_dgc

_EPOCHS = flags.DEFINE_integer("epochs", 4, "Passes over the data.")
_BATCH = flags.DEFINE_integer("batch_size", 64, "Examples per step, all workers.")
_DIRECTORY = flags.DEFINE_string("directory", "run", "For backup, record and model.")


def make_dataset(batch_size):
    """Return 2048 points of two rings, labeled with their ring."""
    random = np.random.default_rng(0)
    angle, ring = random.uniform(0, 2 * np.pi, 2048), random.integers(0, 2, 2048)
    radius = 1 + ring + random.normal(0, 0.1, 2048)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, ring))
    return data.shuffle(2048, seed=0).batch(batch_size, drop_remainder=True)


def make_model():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        tf_dgc.DGCOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), sparsity=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(_):
    logging.set_verbosity(logging.WARNING)  # or TensorFlow's messages appear twice
    # In a Slurm job `tf-dgc run` has already set TF_CONFIG.
    if "TF_CONFIG" not in os.environ and "SLURM_PROCID" in os.environ:
        tf_dgc.cluster.from_slurm()
    strategy = tf_dgc.multi_worker_strategy()
    with strategy.scope():
        model = make_model()
    callbacks = [
        tf_dgc.callbacks.CompressionMonitor(path=f"{_DIRECTORY.value}/run.json"),
        tf_dgc.callbacks.BackupAndRestore(f"{_DIRECTORY.value}/backup"),
    ]
    data = make_dataset(_BATCH.value)
    history = model.fit(data, epochs=_EPOCHS.value, verbose=2, callbacks=callbacks)
    tf_dgc.saving.save_model(model, f"{_DIRECTORY.value}/model.keras")
    if history.history:  # empty if the backup was complete
        print(f"{strategy.num_replicas_in_sync} workers: accuracy "
              f"{history.history['accuracy'][-1]:.1%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    app.run(main)
