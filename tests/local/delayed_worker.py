"""What the workers of test_delaying_workers.py do; started once per worker.

    python delayed_worker.py DIRECTORY MODE

Writes its findings to DIRECTORY/RANK.json. The last worker is late: by MODE "late" it
sleeps, by "hangs" for longer than it is waited for, and by "fails" it raises.
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
from tf_dgc.distribute import cross_device

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STRATEGY = tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())
PERIOD, LATE = 3, 2.0
X = np.random.default_rng(0).normal(size=(144, 5)).astype("float32")
Y = X.mean(axis=1, keepdims=True)


class Late(keras.callbacks.Callback):
    """Lets the last worker be late in its second round; records when batches end."""

    def __init__(self, mode):
        super().__init__()
        self.mode, self.ended, self.started = mode, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(time.monotonic())
        hook = cross_device.cross_device_ops(STRATEGY)
        self.started.append(sum(pair[0] for pair in hook.count().values()))
        if RANK == 1 and batch == PERIOD + 1:
            if self.mode == "fails":
                raise ValueError("it broke")
            time.sleep(12.0 if self.mode == "hangs" else LATE)


def make_model():
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        adam = keras.optimizers.Adam(0.01)
        optimizer = tf_dgc.diloco(adam, PERIOD, delay=PERIOD, exchange="tree")
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


def own(variable):
    """Return this worker's value, whatever all agree on."""
    return STRATEGY.experimental_local_results(variable._value)[0].numpy().tolist()


def state(model):
    model.optimizer.background.finish()
    return [own(v) for v in (*model.variables, *model.optimizer.variables)]


def main(directory, mode):
    model, late = make_model(), Late(mode)
    settings = {"batch_size": 12, "shuffle": False, "verbose": 0}
    model.fit(X, Y, callbacks=[late], **settings)
    path = directory / "model.weights.h5"
    tf_dgc.saving.save_weights(model, path)
    again = make_model()
    with STRATEGY.scope():
        again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    restored = state(model) == state(again)
    for m in (model, again):
        m.fit(X, Y, **settings)
    goes_on = state(model) == state(again)
    seen = model.evaluate(X, Y, batch_size=12, verbose=0)
    anchor = [a.numpy().tolist() for a in model.optimizer.anchor]
    model.optimizer.consensus()
    findings = {
        "ended": np.diff(late.ended).tolist(),
        "started": np.diff(late.started).tolist(),
        "rounds": model.optimizer.stats.steps,
        "restored": restored,
        "goes on": goes_on,
        "anchor": anchor,
        "evaluated": seen,
        "consensus": [own(v) for v in model.trainable_variables],
    }
    (directory / f"{RANK}.json").write_text(json.dumps(findings))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
