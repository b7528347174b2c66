"""Penn Treebank with a word LSTM of two layers."""

import functools
import pathlib

import keras
import numpy as np
import tensorflow as tf

from tasks.recipe_task import Task

WORDS = 10_000
"""Size of the vocabulary."""

_EVALUATION_BATCH = 20  # sections of the text that are read in parallel


class Penn(Task):
    """Predicts the next word with a network as in Zaremba et al. (2014).

    The network has an embedding, two LSTM layers and a softmax over 10,000 words, with
    dropout between layers but not over time. A worker reads `batch_size` sections of
    the text in parallel, each from beginning to end, `length` words per step. The
    LSTM's state is carried from step to step.

    Args:
        data: see `Task`.
        tuning: see `Task`; evaluates on the validation text, which no run trains on.
        units: size of the embedding and of both layers.
        length: number of words per step and section.
        dropout: share of activations that are dropped.
    """

    name = "ptb"
    metric = "perplexity"
    higher_is_better = False

    def __init__(self, data, tuning=False, units=200, length=20, dropout=0.2):
        super().__init__(data, tuning)
        self._units, self.length, self._dropout = units, length, dropout

    @functools.cached_property
    def train(self):
        """Word numbers of the training text."""
        return read(self._folder, "train")

    @functools.cached_property
    def test(self):
        """Word numbers of the test text, or of the validation text when tuning."""
        return read(self._folder, "valid" if self._tuning else "test")

    @property
    def _folder(self):
        return pathlib.Path(self._data, "datasets", "ptb")

    @property
    def num_examples(self):
        """Number of sequences of `length` words in the training text."""
        return len(self.train) // self.length

    def model(self):
        """Return the network with random weights."""
        model = _Network(self._units, self._dropout)
        model(np.zeros((1, self.length), np.int32), self._zeros(1))
        return model

    def carry(self):
        """Return the initial state of both layers, zeros."""
        return self._zeros(self.recipe.batch_size)

    def batch(self, seed, step, worker, workers):
        """Return words and the next words; the seed sets where the text begins."""
        batch_size = self.recipe.batch_size
        text = np.roll(self.train, -_start(seed, len(self.train)))
        section_length = (len(text) - 1) // (batch_size * workers)
        first = worker * batch_size
        starts = np.arange(first, first + batch_size) * section_length
        offset = step * self.length % (section_length - self.length)
        indices = starts[:, np.newaxis] + offset + np.arange(self.length)
        return text[indices], text[indices + 1]

    def outputs(self, model, inputs, carry, seed):
        """Return logits of the next words, and the state without its gradient."""
        logits, state = model(inputs, carry, seed)
        return logits, [tf.stop_gradient(s) for s in state]

    def evaluate(self, model):
        """Return the perplexity per word of the test text."""
        section_length = (len(self.test) - 1) // _EVALUATION_BATCH
        starts = np.arange(_EVALUATION_BATCH)[:, np.newaxis] * section_length
        step = tf.function(lambda *arguments: _total_loss(model, *arguments))
        state, total = self._zeros(_EVALUATION_BATCH), 0.0
        steps = section_length // self.length
        for i in range(steps):
            indices = starts + i * self.length + np.arange(self.length)
            loss, state = step(self.test[indices], self.test[indices + 1], state)
            total += float(loss)
        return perplexity(total / (steps * self.length * _EVALUATION_BATCH))

    def _zeros(self, batch_size):
        return [np.zeros((batch_size, self._units), np.float32) for _ in range(4)]


class _Network(keras.Model):
    def __init__(self, units, dropout):
        super().__init__(name="words")
        self._dropout = dropout
        initializer = keras.initializers.RandomUniform(-0.1, 0.1)
        self._embedding = keras.layers.Embedding(WORDS, units, initializer)
        self._lstm_layers = [
            keras.layers.LSTM(
                units,
                kernel_initializer=initializer,
                recurrent_initializer=initializer,
                return_sequences=True,
                return_state=True,
                unroll=True,
            )
            for _ in range(2)
        ]
        self._words = keras.layers.Dense(WORDS, kernel_initializer=initializer)

    def call(self, words, state, seed=None):
        x = self._apply_dropout(self._embedding(words), seed, 0)
        new_state = []
        for i, layer in enumerate(self._lstm_layers):
            x, *layer_state = layer(x, initial_state=state[2 * i : 2 * i + 2])
            x = self._apply_dropout(x, seed, i + 1)
            new_state += layer_state
        return self._words(x), new_state

    def _apply_dropout(self, x, seed, index):
        if seed is None:  # not training
            return x
        seed = seed + tf.constant([index << 20, 0])
        return tf.nn.experimental.stateless_dropout(x, self._dropout, seed)


def perplexity(loss):
    """Return the perplexity for a mean cross-entropy in nats; inf on overflow."""
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(loss)))


def _total_loss(model, words, targets, state):
    logits, state = model(words, state)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
    return tf.reduce_sum(losses), state


def _start(seed, length):
    return int(np.random.default_rng([seed, 0]).integers(length))


@functools.cache
def read(folder, part):
    """Return the words of a text as numbers.

    Words are numbered in the order of their first use in the training text.

    Args:
        folder: folder of `ptb.train.txt`, `ptb.valid.txt` and `ptb.test.txt`.
        part: "train", "valid" or "test".
    """
    folder = pathlib.Path(folder)
    vocabulary = {}
    for word in _words(folder / "ptb.train.txt"):
        vocabulary.setdefault(word, len(vocabulary))
    words = _words(folder / f"ptb.{part}.txt")
    return np.array([vocabulary[word] for word in words], np.int32)


def _words(path):
    return path.read_text(encoding="utf-8").replace("\n", "<eos>").split()
