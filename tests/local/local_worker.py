"""What the workers of test_local_workers.py do; started once per worker.

    python local_worker.py DIRECTORY

Writes its findings to DIRECTORY/RANK.json.
"""

import pathlib
import sys

import keras
import numpy as np
import on_worker
from on_worker import own

import tf_dgc

PERIOD = 3
X, Y = on_worker.data(96)


class Watched(keras.callbacks.Callback):
    """Records collectives started, and this worker's weights, at each batch's end."""

    def __init__(self):
        super().__init__()
        self.started, self.weights = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.started.append(count())
        self.weights.append(own(self.model.trainable_variables[0]))


def make_model():
    def make_optimizer():
        return tf_dgc.diloco(keras.optimizers.Adam(0.01), PERIOD)

    return on_worker.make_model(make_optimizer, metrics=["mae"])


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
    return sum(on_worker.started().values())


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
    with model.optimizer.consensus_weights():
        started["agreed"] = count() - since
    path = directory / "within.keras"
    model.save(path)  # one path for all
    plain = keras.models.load_model(path, compile=False)
    found["saved"] = [w.tolist() for w in plain.get_weights()]
    with on_worker.STRATEGY.scope():
        shared = keras.Model(model.inputs, model.outputs)
    outputs = shared.predict(X, batch_size=12, verbose=0)
    kernel, bias = map(np.asarray, found["anchor"])
    found["shared"] = bool(np.allclose(outputs, X @ kernel + bias, 1e-4, 1e-6))
    found["unchanged"] = state(model) == before
    return {"found": found, "started": started}


def main(directory):
    model = make_model()
    watched = fit(model)
    looked = look(model, directory)
    path = directory / "model.weights.h5"
    tf_dgc.saving.save_weights(model, path)
    again = on_worker.restored(make_model, path)
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
    on_worker.write(directory, findings)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
