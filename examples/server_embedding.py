"""Two parameter servers, and an embedding that exchanges only the rows of a batch.

    tf-dgc run --servers 2 --workers 2 examples/server_embedding.py

Sentences are synthetic: of 50,000 words, some are more frequent in one class than in
the other. The embedding is on one server, all other variables on the other. A push has
the rows of the words in a batch, a pull the rows that other workers have changed.
"""

import json
import os

import keras
import numpy as np
import reporting
from absl import app, flags

import tf_dgc

_WORDS, _LENGTH, _WIDTH = 50_000, 40, 64
_STEPS = flags.DEFINE_integer("steps", 200, "Steps of each worker.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Examples per step and worker.")


def make_sentences(number, seed):
    """Return sentences of words with a Zipf distribution, and their classes."""
    random = np.random.default_rng(seed)
    words = random.zipf(1.3, (number, _LENGTH)) % _WORDS
    classes = random.integers(0, 2, number)
    is_class_word = random.random((number, _LENGTH)) < 0.3
    class_words = 100 + 200 * classes[:, None] + random.integers(0, 200, words.shape)
    return np.where(is_class_word, class_words, words), classes.astype("float32")


def build_model():
    layers = [
        keras.layers.Embedding(_WORDS, _WIDTH),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((_LENGTH,), dtype="int32"), *layers])
    model.compile(
        tf_dgc.ServerOptimizer(  # `rows` needs plain SGD or Adagrad
            keras.optimizers.Adagrad(0.05, initial_accumulator_value=1e-4),
            "async",
            rows=["embeddings"],
        ),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
    )
    return model


def main(_):
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    model = build_model()
    number = _STEPS.value * _BATCH_SIZE.value
    words, classes = make_sentences(number, seed=1 + worker)
    model.fit(words, classes, _BATCH_SIZE.value, verbose=reporting.verbose())
    optimizer = model.optimizer
    pushed, pulled = optimizer.stats, optimizer.bytes_per_pull
    optimizer.pull_weights()
    words, classes = make_sentences(1000, seed=0)
    _, accuracy = model.evaluate(words, classes, verbose=0)
    print(
        f"worker {worker}: {accuracy:.1%} right, a push is "
        f"{pushed.bytes_per_step:,} bytes and a pull {pulled:,}, "
        f"of {pushed.dense_bytes_per_step:,} of all",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
