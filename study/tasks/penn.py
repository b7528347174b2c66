"""Penn Treebank by a word LSTM of two layers."""

import functools
import pathlib

import keras
import numpy as np
import tensorflow as tf

from tasks.recipe_task import Task

WORDS = 10_000
"""Words of the vocabulary."""

_EVALUATED_TOGETHER = 20  # pieces of the text, side by side


class Penn(Task):
    """The next word, by a network as in Zaremba et al. (2014).

    An embedding, two layers of LSTM and a softmax over 10,000 words, with dropout
    between them and not along time. A worker reads its own part of the text from
    beginning to end, in `batch_size` places at once, `length` words a step; what the
    LSTM remembers is carried from step to step.

    Args:
        data: see `Task`.
        tuning: see `Task`; the validation text is measured on, which is never trained
            on.
        units: size of the embedding and of both layers.
        length: number of words of a step and place.
        dropout: share of activations that are left out.
    """

    name = "ptb"
    metric = "perplexity"
    higher_is_better = False

    def __init__(self, data, tuning=False, units=200, length=20, dropout=0.2):
        super().__init__(data, tuning)
        self._units, self.length, self._dropout = units, length, dropout

    @functools.cached_property
    def train(self):
        """Numbers of the words that are trained on."""
        return read(self._folder, "train")

    @functools.cached_property
    def test(self):
        """Numbers of the words that are measured on."""
        return read(self._folder, "valid" if self._tuning else "test")

    @property
    def _folder(self):
        return pathlib.Path(self._data, "datasets", "ptb")

    @property
    def num_examples(self):
        """Number of pieces of `length` words of a pass."""
        return len(self.train) // self.length

    def model(self):
        """Return the network, with weights drawn anew."""
        model = _Network(self._units, self._dropout)
        model(np.zeros((1, self.length), np.int32), self._zeros(1))
        return model

    def carry(self):
        """Return the memory of both layers of all places, zeros."""
        return self._zeros(self.recipe.batch_size)

    def batch(self, seed, step, worker, workers):
        """Return words, and the same one word later; the seed sets where they begin."""
        places = self.recipe.batch_size * workers
        text = np.roll(self.train, -_start(seed, len(self.train)))
        columns = (len(text) - 1) // places
        first = worker * self.recipe.batch_size
        at = step * self.length % (columns - self.length)
        rows = np.arange(first, first + self.recipe.batch_size) * columns
        chosen = rows[:, np.newaxis] + at + np.arange(self.length)
        return text[chosen], text[chosen + 1]

    def outputs(self, model, inputs, carry, seed):
        """Return logits of the next words, and the memory without its gradient."""
        logits, memory = model(inputs, carry, seed)
        return logits, [tf.stop_gradient(m) for m in memory]

    def evaluate(self, model):
        """Return the perplexity of a word of the whole text."""
        columns = (len(self.test) - 1) // _EVALUATED_TOGETHER
        rows = np.arange(_EVALUATED_TOGETHER)[:, np.newaxis] * columns
        step = tf.function(lambda *arguments: _total_loss(model, *arguments))
        memory, total = self._zeros(_EVALUATED_TOGETHER), 0.0
        steps = columns // self.length
        for i in range(steps):
            at = rows + i * self.length + np.arange(self.length)
            loss, memory = step(self.test[at], self.test[at + 1], memory)
            total += float(loss)
        return perplexity(total / (steps * self.length * _EVALUATED_TOGETHER))

    def _zeros(self, places):
        return [np.zeros((places, self._units), np.float32) for _ in range(4)]


class _Network(keras.Model):
    def __init__(self, units, dropout):
        super().__init__(name="words")
        self._dropout = dropout
        start = keras.initializers.RandomUniform(-0.1, 0.1)
        self._embedding = keras.layers.Embedding(WORDS, units, start)
        settings = {"kernel_initializer": start, "recurrent_initializer": start}
        settings |= {"return_sequences": True, "return_state": True, "unroll": True}
        self._layers_of_memory = [
            keras.layers.LSTM(units, **settings),
            keras.layers.LSTM(units, **settings),
        ]
        self._words = keras.layers.Dense(WORDS, kernel_initializer=start)

    def call(self, words, memory, seed=None):
        x = self._dropped(self._embedding(words), seed, 0)
        new = []
        for i, layer in enumerate(self._layers_of_memory):
            x, *kept = layer(x, initial_state=memory[2 * i : 2 * i + 2])
            x = self._dropped(x, seed, i + 1)
            new += kept
        return self._words(x), new

    def _dropped(self, x, seed, place):
        if seed is None:  # not training
            return x
        seed = seed + tf.constant([place << 20, 0])
        return tf.nn.experimental.stateless_dropout(x, self._dropout, seed)


def perplexity(loss):
    """Return the perplexity of a mean cross-entropy in nats; infinite if too large."""
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(loss)))


def _total_loss(model, words, targets, memory):
    logits, memory = model(words, memory)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
    return tf.reduce_sum(losses), memory


def _start(seed, length):
    return int(np.random.default_rng([seed, 0]).integers(length))


@functools.cache
def read(folder, part):
    """Return the words of a text as numbers, in the order of their first use.

    Args:
        folder: where `ptb.train.txt` and the others are.
        part: "train", "valid" or "test"; numbers are those of the training text.
    """
    folder = pathlib.Path(folder)
    vocabulary = {}
    for word in _words(folder / "ptb.train.txt"):
        vocabulary.setdefault(word, len(vocabulary))
    words = _words(folder / f"ptb.{part}.txt")
    return np.array([vocabulary[word] for word in words], np.int32)


def _words(path):
    return path.read_text(encoding="utf-8").replace("\n", "<eos>").split()
