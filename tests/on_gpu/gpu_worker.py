"""A worker of test_fit_on_gpu.py: trains on its GPU, and writes what came of it."""

import json
import pathlib
import sys

import keras
import small_model

import tf_dgc


def main(folder):
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = small_model.create_model()
    losses = small_model.fit(model)
    result = {
        "device": model.weights[0].value.device,
        "losses": losses,
        "weights": [w.numpy().tolist() for w in model.weights],
    }
    task = strategy.cluster_resolver.task_id
    (folder / f"{task}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
