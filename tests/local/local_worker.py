"""What the workers of test_local_workers.py do; started once per worker.

    python local_worker.py DIRECTORY

Writes its findings to DIRECTORY/RANK.json.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_dgc
from tf_dgc.distribute import cross_device

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STRATEGY = tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())
PERIOD = 3
X = np.random.default_rng(0).normal(size=(96, 5)).astype("float32")
Y = X.mean(axis=1, keepdims=True)


class Watched(keras.callbacks.Callback):
    """Records collectives started, and this worker's weights, at each batch's end."""

    def __init__(self):
        super().__init__()
        self.started, self.weights = [], []

    def on_train_batch_end(self, batch, logs=None):
        hook = cross_device.cross_device_ops(STRATEGY)
        self.started.append(sum(pair[0] for pair in hook.count().values()))
        self.weights.append(own(self.model.trainable_variables[0]))


def own(variable):
    """Return this worker's value, whatever all agree on."""
    return STRATEGY.experimental_local_results(variable._value)[0].numpy().tolist()


def make_model():
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile(
            tf_dgc.diloco(keras.optimizers.Adam(0.01), PERIOD), "mse", metrics=["mae"]
        )
    return model


def fit(model, **settings):
    watched = Watched()
    model.fit(
        X, Y, batch_size=12, shuffle=False, verbose=0, callbacks=[watched], **settings
    )
    return watched


def state(model):
    """Return all that this worker has, of the model and of the optimizer."""
    return [own(v) for v in (*model.variables, *model.optimizer.variables)]


def consensus(model):
    model.optimizer.consensus()
    return [w.tolist() for w in model.get_weights()]


class Seen(keras.callbacks.Callback):
    """Records the weights that are seen at the end of a batch."""

    def on_test_batch_end(self, batch, logs=None):
        self.weights = [w.tolist() for w in self.model.get_weights()]

    on_predict_batch_end = on_test_batch_end


def count():
    hook = cross_device.cross_device_ops(STRATEGY)
    return sum(pair[0] for pair in hook.count().values())


def look(model, directory):
    """Return what is seen within a round, and how many collectives that took."""
    before, seen, started = state(model), Seen(), {}
    found = {"anchor": [a.numpy().tolist() for a in model.optimizer.anchor]}
    for name in ("predict", "evaluate"):
        data = (X,) if name == "predict" else (X, Y)
        since = count()
        getattr(model, name)(*data, batch_size=12, verbose=0, callbacks=[seen])
        started[name], found[name] = count() - since, seen.weights
    since = count()
    with model.optimizer.agreed():
        started["agreed"] = count() - since
    path = directory / "within.keras"
    model.save(path)  # one path for all
    plain = keras.models.load_model(path, compile=False)
    found["saved"] = [w.tolist() for w in plain.get_weights()]
    found["unchanged"] = state(model) == before
    return {"found": found, "started": started}


def main(directory):
    model = make_model()
    watched = fit(model)
    looked = look(model, directory)
    path = directory / "model.weights.h5"
    tf_dgc.saving.save_weights(model, path)
    again = make_model()
    with STRATEGY.scope():
        again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    restored = state(model) == state(again)
    fit(model)
    fit(again)
    findings = {
        "started": np.diff(watched.started).tolist(),
        "weights": watched.weights,
        "rounds": model.optimizer.stats.steps,
        "restored": restored,
        "goes on": state(model) == state(again),
        "consensus": consensus(model),
        "looked": looked,
        "at a consensus": look(model, directory),
    }
    (directory / f"{RANK}.json").write_text(json.dumps(findings))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
