"""The tasks of `convergence.py`: a convolutional network and a character LSTM."""

import functools

import keras
import numpy as np
import tensorflow as tf
from absl import app


class Task:
    """A model, its data and its metric.

    Attributes:
        name: name of the task.
        metric: name of the metric that `evaluate` returns.
        higher_is_better: whether larger values of the metric are better.
        batch_size: examples per worker and step.
        learning_rate: learning rate of the dense run, with momentum 0.9.
        clipnorm: global norm to which the gradient is clipped, or None.
        tolerance: distance to the dense run's metric within which the target is
            reached.
        jit_compile: whether XLA compiles the forward and backward pass.
    """

    name: str
    metric: str
    higher_is_better: bool
    batch_size: int
    learning_rate: float
    clipnorm: float | None
    tolerance: float
    jit_compile = False

    def __init__(self, data_dir):
        self.train, self.test = self.load(data_dir)
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def batch(self, random):
        """Return random inputs and targets of one worker's step."""
        raise NotImplementedError

    def loss(self, model, inputs, targets):
        """Return the mean loss of a batch.

        In the scope of a strategy, Keras divides it by the number of workers.
        """
        return self._loss(targets, model(inputs, training=True))

    def test_loss(self, predict):
        """Return the mean cross-entropy of the test set, in nats."""
        inputs, targets = self.examples()
        return float(self._loss(targets, predict(inputs)))

    def examples(self):
        """Return inputs and targets of the test set."""
        return self.test

    @classmethod
    def reached(cls, value, dense_value):
        """Return whether a run is as good as the dense one, up to the tolerance."""
        sign = 1 if cls.higher_is_better else -1
        # The margin absorbs the rounding of the difference.
        return sign * (value - dense_value) >= -cls.tolerance - 1e-9


class Mnist(Task):
    """Classifies digits with a convolutional network of 80,202 parameters."""

    name = "mnist"
    metric = "accuracy"
    higher_is_better = True
    batch_size = 32
    learning_rate = 0.1
    clipnorm = None
    tolerance = 0.01

    @staticmethod
    def load(data_dir):
        """Return training and test set, each images in [0, 1] and labels."""
        return [_mnist(data_dir, split) for split in ("train", "test")]

    @staticmethod
    def model():
        """Return the network with random weights."""
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
                keras.layers.Conv2D(32, 5, strides=2, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )

    def batch(self, random):
        """Return images and labels."""
        images, labels = self.train
        indices = random.integers(0, len(labels), self.batch_size)
        return images[indices], labels[indices]

    def evaluate(self, predict):
        """Return the test accuracy."""
        images, labels = self.test
        return float(np.mean(np.argmax(predict(images), axis=-1) == labels))


class Shakespeare(Task):
    """Predicts characters of Shakespeare with an LSTM of 74,385 parameters."""

    name = "shakespeare"
    metric = "loss"
    higher_is_better = False
    batch_size = 16
    learning_rate = 1.5
    clipnorm = 1.0
    tolerance = 0.1
    length = 32  # characters of an example
    _CHARACTERS = 65

    @staticmethod
    def load(data_dir):
        """Return training and test text, as numbers below 65."""
        return [shakespeare(data_dir, split) for split in ("train", "test")]

    @classmethod
    def model(cls):
        """Return the network with random weights."""
        return keras.Sequential(
            [
                keras.Input((cls.length,), dtype="int32"),
                keras.layers.Embedding(cls._CHARACTERS, 32),
                keras.layers.LSTM(112, return_sequences=True, unroll=True),
                keras.layers.Dense(cls._CHARACTERS),
            ]
        )

    def batch(self, random):
        """Return sequences of the text, and the sequences one character later."""
        starts = random.integers(0, len(self.train) - self.length, self.batch_size)
        return self._sequences(self.train, starts)

    def evaluate(self, predict):
        """Return the mean cross-entropy per character, in nats."""
        return self.test_loss(predict)

    def examples(self):
        """Return sequences of the test text, and the sequences one character later."""
        starts = np.arange(0, len(self.test) - self.length - 1, self.length)
        return self._sequences(self.test, starts)

    def _sequences(self, text, starts):
        indices = starts[:, np.newaxis] + np.arange(self.length)
        return text[indices], text[indices + 1]


TASKS = {task.name: task for task in (Mnist, Shakespeare)}


@functools.cache
def _mnist(data_dir, split):
    images, labels = read("mnist", data_dir, split)
    return np.float32(images) / 255, np.int32(labels)


def read(name, data_dir, split):
    """Return all images and labels of a data set, uint8 and int64 arrays."""
    images, labels = _load(name, data_dir, split, as_supervised=True, batch_size=-1)
    return np.asarray(images), np.asarray(labels)


@functools.cache
def shakespeare(data_dir, split):
    """Return a text as numbers below 65, int32."""
    (example,) = _load("tiny_shakespeare", data_dir, split)
    # The training text has all 65 characters, and defines their numbers.
    (training,) = _load("tiny_shakespeare", data_dir, "train")
    alphabet = np.unique(np.frombuffer(training["text"].numpy(), np.uint8))
    text = np.frombuffer(example["text"].numpy(), np.uint8)
    return np.searchsorted(alphabet, text).astype(np.int32)


def _load(name, data_dir, split, **options):
    import tensorflow_datasets as tfds  # takes seconds, and some processes need no data

    try:
        return tfds.load(
            name, split=split, data_dir=data_dir, download=False, **options
        )
    except Exception as error:
        raise app.UsageError(
            f"{name} is not in --data_dir={data_dir}. With a network, prepare it once: "
            f"`python -c 'import tensorflow_datasets as t; t.load(\"{name}\")'`. "
            f"TensorFlow Datasets says: {error}"
        ) from error


def predictor(model, batch=1000):
    """Return a function from inputs to the model's outputs, NumPy arrays."""
    compiled = tf.function(lambda inputs: model(inputs, training=False))

    def predict(inputs):
        parts = range(0, len(inputs), batch)
        return np.concatenate([compiled(inputs[i : i + batch]) for i in parts])

    return predict
