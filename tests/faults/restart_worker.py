"""Trains for some epochs with a backup per epoch; started once per worker.

    python restart_worker.py DIRECTORY HOW

HOW is a sparsity of DGC, "adamw" for DGC with AdamW and a sparsity of 90 %, or "local"
for local steps, whose rounds do not end with epochs.

If RESTART_KILL is 1, worker 1 kills itself during the first attempt. The last line of
the output has a digest of the final variables.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import tf_dgc
from tf_dgc.multiworker import worker_variables

TASK = json.loads(os.environ["TF_CONFIG"])["task"]
KILL = TASK["index"] == 1 and os.environ.get("RESTART_KILL") == "1"
DIRECTORY = pathlib.Path(sys.argv[1])


class KillAtStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        if KILL and os.environ["TF_DGC_ATTEMPT"] == "1" and step == 25:
            os.kill(os.getpid(), signal.SIGKILL)


class PrintEpochs(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)


def main():
    keras.utils.set_random_seed(0)
    strategy = tf_dgc.multi_worker_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
        model.add(keras.layers.Dense(1))
        rate = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
        sgd = keras.optimizers.SGD(rate, momentum=0.9)
        if sys.argv[2] == "local":
            optimizer = tf_dgc.local_sgd(sgd, 4)
        elif sys.argv[2] == "adamw":
            optimizer = tf_dgc.DGCOptimizer(keras.optimizers.AdamW(rate), 0.9)
        else:
            optimizer = tf_dgc.DGCOptimizer(sgd, float(sys.argv[2]))
        model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(320, 64)).astype("float32")
    backup = tf_dgc.callbacks.BackupAndRestore(DIRECTORY / "backup")
    model.fit(
        x,
        x.sum(axis=1, keepdims=True),
        batch_size=32,
        epochs=5,
        shuffle=False,
        verbose=0,
        callbacks=[backup, PrintEpochs(), KillAtStep()],
    )
    digest = hashlib.sha256()
    variables = model.variables + optimizer.variables
    if sys.argv[2] == "local":
        optimizer.consensus()  # of the weights; the workers' momenta differ
        variables = model.variables
    for variable in variables:
        per_worker = isinstance(variable, worker_variables.PerWorkerVariable)
        values = variable.gather() if per_worker else variable.numpy()
        digest.update(np.ascontiguousarray(values).data)
    print("digest", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
