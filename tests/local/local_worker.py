"""Worker script of test_local_workers.py, started once per worker.

    python local_worker.py DIRECTORY

Writes its results to DIRECTORY/RANK.json.
"""

import pathlib
import sys

import keras
import numpy as np
import on_worker
from on_worker import local_value

import tf_dgc

PERIOD = 3
X, Y = on_worker.data(96)


class TrainingRecorder(keras.callbacks.Callback):
    """Records started collectives and this worker's weights after each batch."""

    def __init__(self):
        super().__init__()
        self.started, self.weights = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.started.append(count())
        self.weights.append(local_value(self.model.trainable_variables[0]))


def make_model():
    def make_optimizer():
        return tf_dgc.diloco(keras.optimizers.Adam(0.01), PERIOD)

    return on_worker.make_model(make_optimizer, metrics=["mae"])


def fit(model, **settings):
    recorder = TrainingRecorder()
    model.fit(
        X, Y, batch_size=12, shuffle=False, verbose=0, callbacks=[recorder], **settings
    )
    return recorder


def state(model):
    """Return this worker's values of the model and the optimizer."""
    return [local_value(v) for v in (*model.variables, *model.optimizer.variables)]


def consensus(model):
    model.optimizer.consensus()
    return [w.tolist() for w in model.get_weights()]


class EvaluationRecorder(keras.callbacks.Callback):
    """Records the weights that the model has after a batch."""

    def on_test_batch_end(self, batch, logs=None):
        self.weights = [w.tolist() for w in self.model.get_weights()]

    on_predict_batch_end = on_test_batch_end


def count():
    return sum(on_worker.started_collectives().values())


def inspect_weights(model, directory):
    """Return the weights that Keras sees within a round, and numbers of collectives.

    Both are given per access, such as "predict".
    """
    before, recorder, started = state(model), EvaluationRecorder(), {}
    weights = {"anchor": [a.numpy().tolist() for a in model.optimizer.anchor]}
    for name in ("predict", "evaluate"):
        data = (X,) if name == "predict" else (X, Y)
        since = count()
        getattr(model, name)(*data, batch_size=12, verbose=0, callbacks=[recorder])
        started[name], weights[name] = count() - since, recorder.weights
    since = count()
    with model.optimizer.consensus_weights():
        started["agreed"] = count() - since
    path = directory / "within.keras"
    model.save(path)  # one path for all workers
    plain = keras.models.load_model(path, compile=False)
    weights["saved"] = [w.tolist() for w in plain.get_weights()]
    with on_worker.STRATEGY.scope():
        shared = keras.Model(model.inputs, model.outputs)
    outputs = shared.predict(X, batch_size=12, verbose=0)
    kernel, bias = map(np.asarray, weights["anchor"])
    weights["shared"] = bool(np.allclose(outputs, X @ kernel + bias, 1e-4, 1e-6))
    weights["unchanged"] = state(model) == before
    return {"found": weights, "started": started}


def main(directory):
    model = make_model()
    recorder = fit(model)
    inspected = inspect_weights(model, directory)
    path = directory / "model.weights.h5"
    tf_dgc.saving.save_weights(model, path)
    restored_model = on_worker.restore_model(make_model, path)
    is_restored = state(model) == state(restored_model)
    fit(model)
    fit(restored_model)
    results = {
        "started": np.diff(recorder.started).tolist(),
        "weights": recorder.weights,
        "rounds": model.optimizer.stats.steps,
        "restored": is_restored,
        "goes on": state(model) == state(restored_model),
        "consensus": consensus(model),
        "looked": inspected,
        "at a consensus": inspect_weights(model, directory),
    }
    on_worker.write(directory, results)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
