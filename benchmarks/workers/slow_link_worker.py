"""Worker process of `slow_link.py`.

    PYTHONPATH=benchmarks python benchmarks/workers/slow_link_worker.py SETTINGS

SETTINGS are JSON. Every line of standard input names a method of `Worker`, and is
answered by one line on standard output.
"""

import faulthandler
import hashlib
import json
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from common.replies import reply, take_standard_output

import tf_dgc

_INPUTS, _BATCH = 64, 16


class Worker:
    """Runs the phases of a training program.

    Args:
        settings: `parameters`, `seeds` (equal or different), `rank` and `directory`.
    """

    def __init__(self, settings):
        self._settings = settings
        self._path = pathlib.Path(settings["directory"]) / "model.keras"
        self._strategy = None
        self._model = None

    def connect(self):
        """Connect to the other workers."""
        self._strategy = tf_dgc.multi_worker_strategy()

    def build(self):
        """Create the model and the optimizer with its state."""
        equal_seeds = self._settings["seeds"] == "equal"
        keras.utils.set_random_seed(0 if equal_seeds else 1 + self._settings["rank"])
        units = round(self._settings["parameters"] ** 0.5)
        warmup = tf_dgc.schedules.PiecewiseConstantSparsity([1, 2], [0.0, 0.75, 0.999])
        with self._strategy.scope():
            layers = [keras.Input((_INPUTS,)), keras.layers.Dense(units)]
            layers += [keras.layers.Dense(units), keras.layers.Dense(1)]
            self._model = keras.Sequential(layers)
            sgd = keras.optimizers.SGD(1e-4, momentum=0.9)
            self._model.compile(tf_dgc.DGCOptimizer(sgd, warmup), "mse")
            self._model.optimizer.build(self._model.trainable_variables)

    def train(self):
        """Take a dense step, one with 25 % of the entries, and two with 0.1 %."""
        x = np.random.default_rng(0).normal(size=(8 * _BATCH, _INPUTS))
        y = x.sum(axis=1, keepdims=True)
        self._model.fit(x, y, batch_size=2 * _BATCH, verbose=0)

    def backup(self):
        """Write a backup."""
        backup = self._begin_backup(self._model)
        backup.on_epoch_end(0)

    def resume(self):
        """Resume from the backup with a new model."""
        trained = self._model
        self.build()
        self._begin_backup(self._model)
        assert self._digest(self._model) == self._digest(trained)

    def _begin_backup(self, model):
        directory = pathlib.Path(self._settings["directory"]) / "backup"
        backup = tf_dgc.callbacks.BackupAndRestore(directory)
        backup.set_model(model)
        backup.on_train_begin()
        return backup

    def save(self):
        """Save the model with the state of all workers in one file."""
        tf_dgc.saving.save_model(self._model, self._path)

    def restore(self):
        """Load the saved model."""
        with self._strategy.scope():
            loaded = keras.models.load_model(self._path)
        assert self._digest(loaded) == self._digest(self._model)

    def digest(self):
        """Return a digest of the model, equal on all workers with equal models."""
        return self._digest(self._model, state=False)

    def _digest(self, model, state=True):
        local = self._strategy.experimental_local_results
        variables = [*model.variables, *(model.optimizer.variables if state else ())]
        digest = hashlib.sha256()
        for variable in variables:
            digest.update(local(variable.value)[0].numpy().tobytes())
        return digest.hexdigest()


def main(settings):
    """Answer the requests of the benchmark."""
    faulthandler.enable()
    replies = take_standard_output()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    worker = Worker(settings)
    for line in sys.stdin:
        start = time.monotonic()
        result = getattr(worker, json.loads(line)["do"])()
        reply(replies, seconds=time.monotonic() - start, result=result)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
