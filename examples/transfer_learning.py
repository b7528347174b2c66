"""Transfer learning: trains a new head on a frozen network, then the whole network.

    tf-dgc run --workers 2 examples/transfer_learning.py

In place of loading a pretrained network, the example first trains one on the digits 0
to 4. Each phase has its own optimizer for the variables that it trains: frozen
variables need no state and are not sent.
"""

import keras
import reporting
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tf_dgc

_EPOCHS = flags.DEFINE_integer("epochs", 6, "Passes over the data, of each phase.")


def load_data(digits):
    """Return a training set of these digits, and a test set of the last 200."""
    images, labels = load_digits(return_X_y=True)
    mask = (labels >= digits[0]) & (labels <= digits[-1])
    images = (images[mask] / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    labels = labels[mask] - digits[0]
    train = tf.data.Dataset.from_tensor_slices((images[:-200], labels[:-200]))
    test = tf.data.Dataset.from_tensor_slices((images[-200:], labels[-200:]))
    return train.shuffle(1000, seed=0).batch(64), test.batch(200)


def build_body():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
        ]
    )


def train(model, digits, learning_rate, phase):
    """Train the trainable variables, and print the accuracy."""
    sgd = keras.optimizers.SGD(learning_rate, momentum=0.9)
    model.compile(
        tf_dgc.DGCOptimizer(sgd, sparsity=0.95),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    data, test = load_data(digits)
    model.fit(data, epochs=_EPOCHS.value, verbose=reporting.verbose())
    _, accuracy = model.evaluate(test, verbose=0)
    num_bytes = model.optimizer.stats.bytes_per_step
    reporting.log(f"{phase}: accuracy {accuracy:.1%}, {num_bytes:,} bytes per step")


def main(_):
    reporting.silence_tensorflow()
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        body = build_body()
        train(keras.Sequential([body, keras.layers.Dense(5)]), range(5), 0.05, "before")
        body.trainable = False
        model = keras.Sequential([body, keras.layers.Dense(5)])
        train(model, range(5, 10), 0.05, "frozen")
        body.trainable = True
        train(model, range(5, 10), 0.02, "all")


if __name__ == "__main__":
    app.run(main)
