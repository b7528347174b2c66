"""A worker of test_fit_on_gpu.py: trains on its GPU, and writes what came of it."""

import json
import pathlib
import sys

import keras
import numpy as np

import tf_dgc


def main(folder):
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        optimizer = tf_dgc.DGCOptimizer(
            keras.optimizers.SGD(0.1, 0.9), sparsity=0.9, min_compress_size=16
        )
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    history = model.fit(x, y, 16, 3, shuffle=False, verbose=0)
    result = {
        "device": model.weights[0].value.device,
        "losses": history.history["loss"],
        "weights": [w.numpy().tolist() for w in model.weights],
    }
    task = strategy.cluster_resolver.task_id
    (folder / f"{task}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
