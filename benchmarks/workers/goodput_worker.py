"""Trains a small model to a number of steps and records events; started per worker.

    python goodput_worker.py SETTINGS

SETTINGS is JSON: `optimizer` ("dgc" or "local"), `steps`, `steps_per_epoch`,
`batch_size`, and `directory`, where the backup is and where each worker appends its
events to `events-RANK.jsonl`: the time, the number of the attempt, and what happened.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

SETTINGS = json.loads(sys.argv[1])
DIRECTORY = pathlib.Path(SETTINGS["directory"])
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
ATTEMPT = int(os.environ["TF_DGC_ATTEMPT"])


def record(event, **values):
    """Append an event; `time.time()` is the same clock in all processes."""
    row = {"time": time.time(), "attempt": ATTEMPT, "pid": os.getpid(), "event": event}
    with open(DIRECTORY / f"events-{RANK}.jsonl", "a") as file:
        file.write(json.dumps({**row, **values}) + "\n")


record("python")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import tf_dgc  # noqa: E402

record("imports")


class RecordSteps(keras.callbacks.Callback):
    """Records the end of every step, and waits for the rest of its time."""

    def on_train_begin(self, logs=None):
        """Record the step at which training begins."""
        record("train", step=self._step())
        self._begin = time.monotonic()

    def on_train_batch_end(self, batch, logs=None):
        """Wait, and record the step."""
        rest = SETTINGS["step_seconds"] - (time.monotonic() - self._begin)
        time.sleep(max(0.0, rest))
        self._begin = time.monotonic()
        record("step", step=self._step())

    def _step(self):
        return int(self.model.optimizer.iterations.numpy())


def create_optimizer():
    """Return the optimizer of the settings."""
    sgd = keras.optimizers.SGD(0.01, momentum=0.9)
    if SETTINGS["optimizer"] == "local":
        return tf_dgc.local_sgd(sgd, 8)
    return tf_dgc.DGCOptimizer(sgd, 0.99)


def create_model():
    """Return a compiled perceptron of 0.33 million parameters."""
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(2):
        model.add(keras.layers.Dense(512, activation="relu"))
    model.add(keras.layers.Dense(1))
    model.compile(create_optimizer(), "mse")
    return model


def main():
    """Train, and record a digest of the final variables."""
    keras.utils.set_random_seed(0)
    with tf_dgc.multi_worker_strategy().scope():
        model = create_model()
    backup = tf_dgc.callbacks.BackupAndRestore(
        DIRECTORY / "backup", save_freq=SETTINGS["save_every"]
    )
    examples = SETTINGS["batch_size"] * SETTINGS["steps_per_epoch"]
    x = np.random.default_rng(0).normal(size=(examples, 64)).astype("float32")
    model.fit(
        x,
        x.sum(axis=1, keepdims=True),
        batch_size=SETTINGS["batch_size"],
        epochs=SETTINGS["steps"] // SETTINGS["steps_per_epoch"],
        shuffle=False,
        verbose=0,
        callbacks=[backup, RecordSteps()],
    )
    if SETTINGS["optimizer"] == "local":
        model.optimizer.consensus()
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        digest.update(np.ascontiguousarray(variable).data)
    record("end", digest=digest.hexdigest())


if __name__ == "__main__":
    main()
