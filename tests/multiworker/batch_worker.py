"""Counts the batches that Keras's loops draw from each kind of data.

    python batch_worker.py SCENARIO DIRECTORY SOURCE...

starts a worker, which writes its findings to DIRECTORY/RANK.json.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_dgc

NUM_BATCHES = 8
BATCH_SIZE = 4
POWERS = 2.0 ** np.arange(NUM_BATCHES)


def batch(i):
    """Return a batch whose examples are one-hot vectors of the batch's number."""
    x = np.zeros((BATCH_SIZE, NUM_BATCHES), "float32")
    x[:, i] = 1.0
    return x, np.zeros((BATCH_SIZE, 1), "float32")


def generator():
    yield from map(batch, range(NUM_BATCHES))


def endless():
    while True:
        yield from generator()


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return NUM_BATCHES

    def __getitem__(self, i):
        return batch(i)


def make_function_dataset():
    spec = (
        tf.TensorSpec((None, NUM_BATCHES), tf.float32),
        tf.TensorSpec((None, 1), tf.float32),
    )
    return tf.data.Dataset.from_generator(generator, output_signature=spec)


def make_iterator_dataset():
    """Return a data set of unknown shapes that can be read once."""
    once = generator()
    spec = tf.TensorSpec(None, tf.float32)
    dataset = tf.data.Dataset.from_generator(
        lambda: once, output_signature=(spec, spec)
    )
    return dataset.map(lambda x, y: (tf.ensure_shape(x, (None, None)), y)).map(
        lambda x, y: (x, tf.ensure_shape(y, (None, 1)))
    )


def arrays():
    return tuple(map(np.concatenate, zip(*generator(), strict=True)))


# Functions that create a loop's arguments.
SOURCES = {
    "generator": lambda: {"x": generator()},
    "PyDataset": lambda: {"x": Batches()},
    "PyDataset of 2 workers": lambda: {"x": Batches(workers=2)},
    "from_generator": lambda: {"x": make_function_dataset()},
    "from_generator once": lambda: {"x": make_iterator_dataset()},
    "arrays": lambda: {
        **dict(zip("xy", arrays(), strict=True)),
        "batch_size": BATCH_SIZE,
    },
}


class Order(keras.callbacks.Callback):
    """Records the number of each step's batch, by the weight that changed."""

    def on_train_begin(self, logs=None):
        self.steps = []
        self.before = np.zeros(NUM_BATCHES)

    def on_train_batch_end(self, batch, logs=None):
        weights = self.model.get_weights()[0][:, 0]
        self.steps.append(float(np.argmax(weights - self.before)))
        self.before = weights


class Counter:
    """Counts batches with models whose weights or predictions identify them.

    Args:
        strategy: strategy in whose scope models are created; None for plain Keras.
    """

    def __init__(self, strategy):
        self._scope = strategy.scope if strategy else tf.init_scope
        self._optimizer = tf_dgc.DGCOptimizer if strategy else lambda inner, _: inner

    def make_model(self, initial, rate, **settings):
        with self._scope():
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer=initial)
            model = keras.Sequential([layer])
            # Batch `i` changes weight `i` by the rate.
            model.compile(
                self._optimizer(keras.optimizers.SGD(rate), 0.0),
                lambda _, predictions: -predictions,
                **settings,
            )
        return model

    def count_in_fit(self, model, **arguments):
        """Return how often `fit` draws each batch."""
        before = model.get_weights()[0][:, 0] if model.built else np.zeros(NUM_BATCHES)
        model.fit(**arguments, verbose=0, shuffle=False)
        return (model.get_weights()[0][:, 0] - before).tolist()

    def count(self, sources):
        """Return the batches that every loop draws, by names of loop and source."""
        counts = {}
        for name in sources:
            data = SOURCES[name]
            order = Order()
            model = self.make_model("zeros", 1.0)
            counts["fit", name] = self.count_in_fit(model, callbacks=[order], **data())
            counts["order", name] = order.steps
            counts["fit again", name] = self.count_in_fit(model, **data())
            if "gen" in name:
                counts["steps per execution", name] = self.count_in_fit(
                    self.make_model("zeros", 1.0, steps_per_execution=2), **data()
                )
            counts["evaluate", name] = -self.with_powers().evaluate(**data(), verbose=0)
            data = data()
            data.pop("y", None)
            counts["predict", name] = self.with_powers().predict(**data, verbose=0)
        return {
            "/".join(key): np.ravel(value).tolist() for key, value in counts.items()
        }

    def count_in_validation_and_epochs(self):
        """Return the batches of validation, several epochs and several `fit`s."""
        counts = {}
        for name in ("PyDataset of 2 workers", "arrays"):
            valid = SOURCES[name]()
            pair = valid["x"], valid.get("y")
            history = self.with_powers().fit(
                generator(),
                validation_data=pair if "y" in valid else valid["x"],
                validation_batch_size=valid.get("batch_size"),
                shuffle=False,
                verbose=0,
            )
            counts[f"validation by {name}"] = -history.history["val_loss"][0]
        model = self.make_model("zeros", 1.0)
        parts = {"steps_per_epoch": 2, "epochs": NUM_BATCHES // 2}
        counts["parts"] = self.count_in_fit(model, x=generator(), **parts)
        counts["3 epochs"] = self.count_in_fit(model, x=Batches(workers=2), epochs=3)
        shared = endless()
        fits = [self.count_in_fit(model, x=shared, steps_per_epoch=8) for _ in range(3)]
        counts["steps of one generator"] = sum(map(sum, fits))
        return counts

    def with_powers(self):
        """Return a model whose prediction of a batch is 2 to the batch's number."""

        def powers(shape, dtype=None):
            return tf.constant(POWERS[:, np.newaxis], dtype)

        return self.make_model(powers, 0.0)


def expected(sources):
    """Return the result of `Counter.count` if every batch is drawn once."""
    once = [1.0] * NUM_BATCHES
    counts = {}
    for name in sources:
        counts[f"fit/{name}"] = counts[f"fit again/{name}"] = once
        counts[f"order/{name}"] = list(map(float, range(NUM_BATCHES)))
        if "gen" in name:
            counts[f"steps per execution/{name}"] = once
        counts[f"evaluate/{name}"] = [float(POWERS.mean())]
        counts[f"predict/{name}"] = np.repeat(POWERS, BATCH_SIZE).tolist()
    return counts


EXPECTED_IN_VALIDATION_AND_EPOCHS = {
    "validation by PyDataset of 2 workers": float(POWERS.mean()),
    "validation by arrays": float(POWERS.mean()),
    "parts": [1.0] * NUM_BATCHES,
    "3 epochs": [3.0] * NUM_BATCHES,
    "steps of one generator": 24.0,
}


def scenario_count(strategy):
    return Counter(strategy).count(sys.argv[3:])


def scenario_count_in_validation_and_epochs(strategy):
    return Counter(strategy).count_in_validation_and_epochs()


def scenario_stress(strategy):
    """Run many short `fit`s on generators; return their distinct counts."""
    counter = Counter(strategy)
    model = counter.make_model("zeros", 1.0)
    counts = [counter.count_in_fit(model, x=generator()) for _ in range(200)]
    return {"counts": np.unique(counts).tolist()}


if __name__ == "__main__":
    RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    findings = globals()[f"scenario_{sys.argv[1]}"](tf_dgc.multi_worker_strategy())
    path = pathlib.Path(sys.argv[2]) / f"{RANK}.json"
    path.write_text(json.dumps(findings))
