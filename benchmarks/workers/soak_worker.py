"""Worker process of `soak.py`.

    PYTHONPATH=benchmarks python benchmarks/workers/soak_worker.py SETTINGS

SETTINGS are JSON. The worker trains with `model.fit`, and writes a line of figures to
standard output after every part of the run.
"""

import faulthandler
import gc
import json
import os
import pathlib
import statistics
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from common.replies import reply, take_standard_output

import tf_dgc
from tf_dgc._internals import tracing
from tf_dgc.multiworker.cross_device import cross_device_ops

_EXAMPLES, _FEATURES = 4096, 32


def main(settings):
    """Train, and write figures after every part."""
    faulthandler.enable()
    replies = take_standard_output()
    logging.set_verbosity(logging.WARNING)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    loss = CountingLoss()
    with strategy.scope():
        model = create_model()
        model.compile(create_optimizer(), loss)
    model.fit(
        create_data(),
        epochs=settings["parts"],
        steps_per_epoch=settings["steps"] // settings["parts"],
        callbacks=[Reporter(strategy, loss, replies)],
        shuffle=False,
        verbose=0,
    )
    sys.stdin.read()  # until the parent has all answers and ends the workers


def create_model():
    """Return a small model with two compressed tensors."""
    return keras.Sequential(
        [
            keras.Input((_FEATURES,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def create_optimizer():
    """Return the optimizer to test."""
    sgd = keras.optimizers.SGD(0.01, momentum=0.9)
    return tf_dgc.DGCOptimizer(
        sgd, sparsity=0.99, diagnostics=tf_dgc.Diagnostics(track_staleness=True)
    )


def create_data():
    """Return an endless dataset with noise, so that gradients never vanish."""
    random = np.random.default_rng(0)
    x = random.normal(size=(_EXAMPLES, _FEATURES)).astype("float32")
    y = np.sin(x[:, :1]) + random.normal(size=(_EXAMPLES, 1), scale=0.5)
    data = tf.data.Dataset.from_tensor_slices((x, y.astype("float32")))
    return data.shuffle(_EXAMPLES, seed=0).repeat().batch(32)


class CountingLoss(keras.losses.MeanSquaredError):
    """Counts its traces: Python runs `call` only while tracing."""

    traces = 0

    def call(self, y_true, y_pred):
        """Return the squared error."""
        self.traces += 1
        return super().call(y_true, y_pred)


class Reporter(keras.callbacks.Callback):
    """Writes the figures that must not grow after every epoch."""

    def __init__(self, strategy, loss, replies):
        super().__init__()
        self._strategy = strategy
        self._loss = loss
        self._replies = replies
        self._times = []
        self._start = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Stop the clock."""
        self._times.append(1000 * (time.perf_counter() - self._start))

    def on_epoch_end(self, epoch, logs=None):
        """Write the figures."""
        optimizer = self.model.optimizer
        staleness = optimizer.staleness
        local = self._strategy.experimental_local_results
        residual = [local(v.value)[0].numpy() for v in optimizer.residual]
        times, self._times = self._times, []
        gc.collect()
        reply(
            self._replies,
            steps=optimizer.stats.steps,
            loss=float(logs["loss"]),
            median_ms=statistics.median(times),
            memory_mb=resident_bytes() / 1e6,
            traces=self._loss.traces,
            functions=tracing.num_functions(),
            keys=cross_device_ops(self._strategy).num_keys,
            residual_norm=float(np.sqrt(sum(np.sum(r**2) for r in residual))),
            staleness_mean=staleness.mean,
            staleness_p99=staleness.p99,
            staleness_max=staleness.max,
        )


def resident_bytes():
    """Return the bytes that this process has in memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
