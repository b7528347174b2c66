"""A custom compression method, defined outside the package.

    tf-dgc run --workers 2 examples/own_compressor.py

Sends the mean of the positive and of the negative entries, and one bit per entry.
"""

import keras
import numpy as np
import reporting
import tensorflow as tf

import tf_dgc
from tf_dgc import compressors
from tf_dgc.compressors import num_stream_words, pack_bits, unpack_bits


@keras.saving.register_keras_serializable(package="mine")
class TwoMeans(compressors.OneRound, compressors.Quantizer):
    """Sends signs, and the mean of each sign's entries."""

    name = "two_means"
    reference = "Seide et al., 1-bit SGD, Interspeech 2014 (one column)"
    error_feedback = "required"

    def words(self, size, dtype):
        return 2 + num_stream_words(size)

    def encode(self, values, draw):
        negative = tf.cast(values < 0, tf.int32)
        means = tf.math.unsorted_segment_mean(values, negative, 2)
        bits = tf.bitcast(tf.cast(means, tf.float32), tf.int32)
        return tf.concat([bits, pack_bits(negative)], axis=0)

    def decode(self, words, size, dtype):
        means = tf.cast(tf.bitcast(words[:2], tf.float32), dtype)
        negative = unpack_bits(words[tf.newaxis, 2:])[0, :size]
        return tf.gather(means, tf.cast(negative, tf.int32))


def main():
    random = np.random.default_rng(0)
    x = random.normal(size=(2048, 64)).astype("float32")
    y = np.sin(x @ random.normal(size=(64, 1)) / 8)
    keras.utils.set_random_seed(0)
    strategy = tf_dgc.multi_worker_strategy()
    with strategy.scope():
        layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        sgd = keras.optimizers.SGD(0.05)
        optimizer = tf_dgc.CompressedOptimizer(sgd, TwoMeans())
        model.compile(optimizer, "mse")
    verbose = reporting.verbose()
    history = model.fit(x, y, epochs=10, batch_size=128, verbose=verbose).history
    stats = optimizer.stats
    print(f"loss {history['loss'][0]:.4f} -> {history['loss'][-1]:.4f}")
    print(f"{stats.bytes_per_step} bytes per step, 1/{stats.ratio:.0f} of dense")


if __name__ == "__main__":
    main()
