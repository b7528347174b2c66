"""Training from a Python generator, which does not know its number of batches.

    tf-dgc run --workers 2 examples/generator.py

The generator is endless, so `--epochs` times `--steps` is the number of training steps,
for `fit` and for `dgc_for_steps`. Every worker generates the same batches, from the
same seed, and trains on its share of each.
"""

import keras
import numpy as np
import reporting
from absl import app, flags
from sklearn.datasets import load_digits

import tf_dgc

_EPOCHS = flags.DEFINE_integer("epochs", 4, "Number of epochs.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 50, "Steps of an epoch.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 128, "Examples per step, all workers.")


def load_data():
    """Return a training set of 1,500 images with labels, and a test set."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def generate_batches(images, labels):
    """Yield random images with noise, and their labels, without end."""
    random = np.random.default_rng(0)  # one seed for all workers
    while True:
        chosen = random.integers(len(images), size=_BATCH_SIZE.value)
        noise = random.normal(scale=0.2, size=(len(chosen), 64))
        yield (images[chosen] + noise).astype("float32"), labels[chosen]


def build_model():
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def main(_):
    reporting.silence_tensorflow()
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    steps = _EPOCHS.value * _STEPS.value
    with strategy.scope():
        model = build_model()
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(
            tf_dgc.dgc_for_steps(sgd, steps),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    train, (images, labels) = load_data()
    model.fit(
        generate_batches(*train),
        epochs=_EPOCHS.value,
        steps_per_epoch=_STEPS.value,
        shuffle=False,
        verbose=reporting.verbose(),
    )
    _, accuracy = model.evaluate(images, labels, batch_size=len(images), verbose=0)
    stats = model.optimizer.stats
    reporting.log(f"accuracy {accuracy:.1%} after {stats.steps} steps")
    reporting.log(f"{stats.bytes_per_step:,} bytes per step, 1/{stats.ratio:.0f}")


if __name__ == "__main__":
    app.run(main)
