"""Which batches Keras's loops draw from data of every kind.

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

NUMBER, ROWS = 8, 4  # of batches; of examples of each
POWERS = 2.0 ** np.arange(NUMBER)


def batch(i):
    """Return a batch of which every example says that it is in batch `i`."""
    x = np.zeros((ROWS, NUMBER), "float32")
    x[:, i] = 1.0
    return x, np.zeros((ROWS, 1), "float32")


def generator():
    yield from map(batch, range(NUMBER))


def endless():
    while True:
        yield from generator()


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return NUMBER

    def __getitem__(self, i):
        return batch(i)


def of_a_function():
    spec = (
        tf.TensorSpec((None, NUMBER), tf.float32),
        tf.TensorSpec((None, 1), tf.float32),
    )
    return tf.data.Dataset.from_generator(generator, output_signature=spec)


def of_an_iterator():
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


# What is passed to a loop, made anew for each.
SOURCES = {
    "generator": lambda: {"x": generator()},
    "PyDataset": lambda: {"x": Batches()},
    "PyDataset of 2 workers": lambda: {"x": Batches(workers=2)},
    "from_generator": lambda: {"x": of_a_function()},
    "from_generator once": lambda: {"x": of_an_iterator()},
    "arrays": lambda: {**dict(zip("xy", arrays(), strict=True)), "batch_size": ROWS},
}


class Order(keras.callbacks.Callback):
    """Records which batch each step of `fit` was given, by the weight that moved."""

    def on_train_begin(self, logs=None):
        self.steps = []
        self.before = np.zeros(NUMBER)

    def on_train_batch_end(self, batch, logs=None):
        weights = self.model.get_weights()[0][:, 0]
        self.steps.append(float(np.argmax(weights - self.before)))
        self.before = weights


class Counter:
    """Models, not built yet, that tell which batches they were given.

    Args:
        strategy: strategy in whose scope they are made; None for plain Keras.
    """

    def __init__(self, strategy):
        self._scope = strategy.scope if strategy else tf.init_scope
        self._optimizer = tf_dgc.DGCOptimizer if strategy else lambda inner, _: inner

    def make(self, initial, rate, **settings):
        with self._scope():
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer=initial)
            model = keras.Sequential([layer])
            # A batch moves its own weight by the rate.
            model.compile(
                self._optimizer(keras.optimizers.SGD(rate), 0.0),
                lambda _, predictions: -predictions,
                **settings,
            )
        return model

    def trained(self, model, **arguments):
        """Return how often `fit` draws each batch."""
        before = model.get_weights()[0][:, 0] if model.built else np.zeros(NUMBER)
        model.fit(**arguments, verbose=0, shuffle=False)
        return (model.get_weights()[0][:, 0] - before).tolist()

    def find(self, sources):
        """Return what every loop draws, by its name and its data."""
        found = {}
        for name in sources:
            data, order = SOURCES[name], Order()
            model = self.make("zeros", 1.0)
            found["fit", name] = self.trained(model, callbacks=[order], **data())
            found["order", name] = order.steps
            found["fit again", name] = self.trained(model, **data())
            if "gen" in name:
                found["steps per execution", name] = self.trained(
                    self.make("zeros", 1.0, steps_per_execution=2), **data()
                )
            found["evaluate", name] = -self.with_powers().evaluate(**data(), verbose=0)
            data = data()
            data.pop("y", None)
            found["predict", name] = self.with_powers().predict(**data, verbose=0)
        return {"/".join(key): np.ravel(value).tolist() for key, value in found.items()}

    def find_more(self):
        """Return what several epochs, validation and several `fit`s draw."""
        found = {}
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
            found[f"validation by {name}"] = -history.history["val_loss"][0]
        model = self.make("zeros", 1.0)
        parts = {"steps_per_epoch": 2, "epochs": NUMBER // 2}
        found["parts"] = self.trained(model, x=generator(), **parts)
        found["3 epochs"] = self.trained(model, x=Batches(workers=2), epochs=3)
        shared = endless()
        counts = [self.trained(model, x=shared, steps_per_epoch=8) for _ in range(3)]
        found["steps of one generator"] = sum(map(sum, counts))
        return found

    def with_powers(self):
        """Return a model whose prediction of a batch is 2 to the batch's number."""

        def powers(shape, dtype=None):
            return tf.constant(POWERS[:, np.newaxis], dtype)

        return self.make(powers, 0.0)


def expected(sources):
    """Return what `Counter.find` does where every batch is drawn once."""
    once = [1.0] * NUMBER
    found = {}
    for name in sources:
        found[f"fit/{name}"] = found[f"fit again/{name}"] = once
        found[f"order/{name}"] = list(map(float, range(NUMBER)))
        if "gen" in name:
            found[f"steps per execution/{name}"] = once
        found[f"evaluate/{name}"] = [float(POWERS.mean())]
        found[f"predict/{name}"] = np.repeat(POWERS, ROWS).tolist()
    return found


EXPECTED_MORE = {
    "validation by PyDataset of 2 workers": float(POWERS.mean()),
    "validation by arrays": float(POWERS.mean()),
    "parts": [1.0] * NUMBER,
    "3 epochs": [3.0] * NUMBER,
    "steps of one generator": 24.0,
}


def scenario_find(strategy):
    return Counter(strategy).find(sys.argv[3:])


def scenario_find_more(strategy):
    return Counter(strategy).find_more()


def scenario_stress(strategy):
    """Many short `fit`s on generators; returns the counts of the last one."""
    counter = Counter(strategy)
    model = counter.make("zeros", 1.0)
    counts = [counter.trained(model, x=generator()) for _ in range(200)]
    return {"counts": np.unique(counts).tolist()}


if __name__ == "__main__":
    RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    findings = globals()[f"scenario_{sys.argv[1]}"](tf_dgc.multi_worker_strategy())
    path = pathlib.Path(sys.argv[2]) / f"{RANK}.json"
    path.write_text(json.dumps(findings))
