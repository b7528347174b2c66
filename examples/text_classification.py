"""Text classification with an embedding, whose gradient has only a batch's rows.

    tf-dgc run --workers 2 examples/text_classification.py

Sentences are synthetic: of 20,000 words, some are more frequent in one class than in
the other. The embedding's gradient remains `tf.IndexedSlices` until the entries to send
are selected.
"""

import keras
import numpy as np
import reporting
import tensorflow as tf
from absl import app, flags

import tf_dgc

_WORDS, _LENGTH = 20_000, 40
_STEPS = flags.DEFINE_integer("steps", 150, "Training steps.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Examples per step, all workers.")


def make_sentences(number, seed):
    """Return texts of words with a Zipf distribution, and their classes."""
    random = np.random.default_rng(seed)
    words = random.zipf(1.3, (number, _LENGTH)) % _WORDS
    classes = random.integers(0, 2, number)
    is_class_word = random.random((number, _LENGTH)) < 0.1
    class_words = 100 + 200 * classes[:, None] + random.integers(0, 200, words.shape)
    words = np.where(is_class_word, class_words, words)
    return [" ".join(f"w{word}" for word in line) for line in words], classes


def build_model(texts):
    vectorize = keras.layers.TextVectorization(_WORDS, output_sequence_length=_LENGTH)
    vectorize.adapt(texts)
    model = keras.Sequential(
        [
            keras.Input((_LENGTH,), dtype="int32"),
            keras.layers.Embedding(_WORDS, 64),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    return vectorize, model


def main(_):
    reporting.silence_tensorflow()
    strategy = tf_dgc.multi_worker_strategy()
    keras.utils.set_random_seed(0)
    texts, classes = make_sentences(4000, seed=0)
    with strategy.scope():
        vectorize, model = build_model(texts)
        model.compile(
            tf_dgc.DGCOptimizer(keras.optimizers.Adam(3e-3), sparsity=0.99),
            keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
        )
    data = tf.data.Dataset.from_tensor_slices((texts, classes.astype("float32")))
    data = data.shuffle(4000, seed=0).repeat().batch(_BATCH_SIZE.value)
    data = data.map(lambda text, y: (vectorize(text), y)).prefetch(2)
    model.fit(data, steps_per_epoch=_STEPS.value, verbose=reporting.verbose())
    texts, classes = make_sentences(1000, seed=1)
    outputs = model.predict(vectorize(tf.constant(texts)), verbose=0)
    accuracy = np.mean((outputs[:, 0] > 0) == classes)
    stats = model.optimizer.stats
    reporting.log(f"accuracy {accuracy:.1%}")
    reporting.log(f"{stats.bytes_per_step:,} bytes per step, 1/{stats.ratio:.0f}")


if __name__ == "__main__":
    app.run(main)
