"""A generative adversarial network: two models, and a compressed optimizer for each.

    tf-dgc run --workers 2 examples/gan.py

The generator learns points on a circle. Keras divides the losses by the number of
workers, since gradients are summed over workers.
"""

import keras
import numpy as np
import reporting
import tensorflow as tf
from absl import app, flags

import tf_dgc

_EPOCHS = flags.DEFINE_integer("epochs", 10, "Passes over 64 batches.", lower_bound=1)
_NOISE = 8


def build_part(inputs, outputs):
    layers = [keras.layers.Dense(128, activation="leaky_relu") for _ in range(2)]
    layers.append(keras.layers.Dense(outputs))
    return keras.Sequential([keras.Input((inputs,)), *layers])


class Gan(keras.Model):
    """Two models, each with its own optimizer."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = build_part(_NOISE, 2), build_part(2, 1)
        self.optimizers = {
            name: tf_dgc.DGCOptimizer(
                keras.optimizers.Adam(2e-3, beta_1=0.5), sparsity=0.9, name=name
            )
            for name in ("generator", "critic")
        }
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        self.compile()

    def call(self, points):
        return self.critic(points)

    def train_step(self, real):
        workers = tf.distribute.get_strategy().num_replicas_in_sync
        noise = tf.random.normal([tf.shape(real)[0], _NOISE])
        with tf.GradientTape(persistent=True) as tape:
            fake, true = self.critic(self.generator(noise)), self.critic(real)
            zeros, ones = tf.zeros_like(true), tf.ones_like(true)
            critic = self.entropy(zeros, fake) + self.entropy(ones, true)
            losses = {"critic": critic, "generator": self.entropy(ones, fake)}
        for name, loss in losses.items():
            variables = getattr(self, name).trainable_variables
            self.optimizers[name].apply(tape.gradient(loss, variables), variables)
        return {name: workers * loss for name, loss in losses.items()}


def main(_):
    reporting.silence_tensorflow()
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        gan = Gan()
    angles = np.random.default_rng(0).uniform(0, 2 * np.pi, 64 * 128)
    points = np.stack([np.cos(angles), np.sin(angles)], 1).astype("float32")
    data = tf.data.Dataset.from_tensor_slices(points).shuffle(8192).batch(128)
    callbacks = [tf_dgc.callbacks.CompressionMonitor(optimizer=gan.optimizers)]
    verbose = reporting.verbose()
    gan.fit(data, epochs=_EPOCHS.value, callbacks=callbacks, verbose=verbose)
    samples = gan.generator.predict(tf.random.normal([1000, _NOISE]), verbose=0)
    distance = np.abs(np.linalg.norm(samples, axis=1) - 1).mean()
    reporting.log(f"points are {distance:.2f} from the circle")
    for name, optimizer in gan.optimizers.items():
        reporting.log(f"{name}: {optimizer.stats.bytes_per_step:,} bytes per step")


if __name__ == "__main__":
    app.run(main)
