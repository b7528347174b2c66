"""Worker script of test_server_workers.py, started once per worker.

    python server_worker.py DIRECTORY MODE [STALENESS]

Writes its results to DIRECTORY/RANK.json.
"""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np

import tf_dgc

DIRECTORY, MODE, *STALENESS = sys.argv[1:]
CONFIG = json.loads(os.environ["TF_CONFIG"])
RANK = CONFIG["task"]["index"]
X = np.random.default_rng(RANK).normal(size=(96, 40)).astype("float32")
Y = X.mean(axis=1, keepdims=True)


class ClockRecorder(keras.callbacks.Callback):
    """Records the server's clock after each execution of `fit`."""

    clocks = ()

    def on_train_batch_end(self, batch, logs=None):
        self.clocks = [*self.clocks, int(self.model.optimizer.iterations)]


def main():
    keras.utils.set_random_seed(RANK)  # so that initial weights differ between workers
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((40,)), *layers])
    model.compile(
        tf_dgc.ServerOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9),
            MODE,
            int(STALENESS[0]) if STALENESS else None,
            compressor=tf_dgc.compressors.TopK(0.9),
        ),
        "mse",
        metrics=["mae"],
        steps_per_execution=2,
    )
    recorder = ClockRecorder()
    scheduler = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate / (1 + epoch)
    )
    start = time.time()
    history = model.fit(
        X,
        Y,
        batch_size=12,
        epochs=3,
        validation_data=(X[:24], Y[:24]),
        verbose=0,
        callbacks=[recorder, scheduler],
    ).history
    optimizer = model.optimizer
    if RANK == 0:
        time.sleep(1.0)  # until the other workers have finished
    optimizer.pull_weights()
    results = {
        "loss": history["loss"],
        "val_loss": history["val_loss"],
        "clocks": recorder.clocks,
        "clock": int(optimizer.iterations),
        "weights": [w.tolist() for w in model.get_weights()],
        "bytes": optimizer.stats.bytes_per_step,
        "ratio": optimizer.stats.ratio,
        "seconds": time.time() - start,
    }
    pathlib.Path(DIRECTORY, f"{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
