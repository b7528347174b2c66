"""Worker script of test_gossip_workers.py, started once per worker.

    python gossip_worker.py DIRECTORY

Writes its results to DIRECTORY/RANK.json.
"""

import pathlib
import sys

import keras
import on_worker

import tf_dgc

PATH = [[0.75, 0.25, 0], [0.25, 0.5, 0.25], [0, 0.25, 0.75]]
X, Y = on_worker.data(96)


class Recorder(keras.callbacks.Callback):
    """Records collectives by group and this worker's weights after each batch."""

    def __init__(self):
        super().__init__()
        self.started, self.weights = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.started.append(on_worker.started_collectives())
        self.weights.append(weights(self.model))


def weights(model):
    return list(map(on_worker.local_value, model.weights))


def train(directory, name, graph, **settings):
    def make_optimizer():
        sgd = keras.optimizers.SGD(0.1)
        return tf_dgc.LocalOptimizer(sgd, 2, collective=graph, **settings)

    model = on_worker.make_model(make_optimizer)
    recorder = Recorder()
    model.fit(X, Y, 24, callbacks=[recorder], shuffle=False, verbose=0)
    before, loss = weights(model), model.evaluate(X, Y, batch_size=24, verbose=0)
    path = directory / f"{name}.keras"
    model.save(path)
    saved = weights(keras.models.load_model(path, compile=False))
    unchanged = weights(model) == before
    model.optimizer.consensus()
    return {
        "started": recorder.started,
        "weights": recorder.weights,
        "loss": loss,
        "saved": saved,
        "unchanged": unchanged,
        "consensus": weights(model),
        "steps": model.optimizer.stats.steps,
    }


def main(directory):
    gossip = tf_dgc.collectives.Gossip
    results = {
        "d-psgd": train(directory, "d-psgd", gossip(PATH)),
        "choco": train(
            directory, "choco", gossip(PATH, 0.5), compressor="uniform_8bit",
            min_compress_size=0,
        ),
        "one-peer": train(directory, "one-peer", gossip("exponential")),
    }  # fmt: skip
    on_worker.write(directory, results)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
