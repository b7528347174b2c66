"""A custom `train_step` with `fit`: a variational autoencoder of digits.

    tf-dgc run --workers 2 examples/custom_train_step.py

Like Keras's own step, it divides the loss by the number of workers, since gradients are
summed over workers, and passes the gradients to the optimizer.
"""

import keras
import reporting
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tf_dgc

_EPOCHS = flags.DEFINE_integer("epochs", 15, "Passes over the data.", lower_bound=1)
_CODE = 8


def build_part(inputs, outputs):
    layers = [keras.layers.Dense(256, activation="relu") for _ in range(2)]
    layers.append(keras.layers.Dense(outputs))
    return keras.Sequential([keras.Input((inputs,)), *layers])


class Autoencoder(keras.Model):
    """A variational autoencoder with normally distributed codes."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = build_part(64, 2 * _CODE), build_part(_CODE, 64)
        names = "loss", "error", "divergence"
        self._trackers = [keras.metrics.Mean(name) for name in names]

    @property
    def metrics(self):
        return self._trackers

    def call(self, x):
        return self.decoder(self.encoder(x)[:, :_CODE])

    def train_step(self, x):
        workers = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(x, training=True), 2, axis=1)
            code = mean + tf.exp(0.5 * log_variance) * tf.random.normal(tf.shape(mean))
            squares = tf.square(self.decoder(code, training=True) - x)
            error = tf.reduce_mean(tf.reduce_sum(squares, 1))
            spread = tf.square(mean) + tf.exp(log_variance) - log_variance - 1
            divergence = 0.5 * tf.reduce_mean(tf.reduce_sum(spread, 1))
            loss = error + 0.1 * divergence
            worker_loss = loss / workers
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(worker_loss, variables), variables)
        for tracker, value in zip(self.metrics, (loss, error, divergence), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.metrics}


def main(_):
    reporting.silence_tensorflow()
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    images = (load_digits(return_X_y=True)[0] / 16.0).astype("float32")
    with strategy.scope():
        model = Autoencoder()
        optimizer = tf_dgc.DGCOptimizer(keras.optimizers.Adam(2e-3), sparsity=0.95)
        model.compile(optimizer)
    data = tf.data.Dataset.from_tensor_slices(images).shuffle(2000, seed=0)
    data = data.batch(64, drop_remainder=True)  # equal batches on all workers
    verbose = reporting.verbose()
    history = model.fit(data, epochs=_EPOCHS.value, verbose=verbose).history
    error, ratio = history["error"], optimizer.stats.ratio
    reporting.log(f"error {error[0]:.2f} -> {error[-1]:.2f}, 1/{ratio:.0f} sent")


if __name__ == "__main__":
    app.run(main)
