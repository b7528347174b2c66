"""MNIST and Shakespeare of `convergence.py` as tasks of the registered plan."""

import functools

import numpy as np

from tasks import small as common_tasks
from tasks.recipe_task import Task, shuffled

_NUM_HELD_BACK = 5_000


class Mnist(Task):
    """Classifies digits with a convolutional network of 80,202 parameters."""

    name = "mnist"
    metric = "accuracy"
    higher_is_better = True
    model = staticmethod(common_tasks.Mnist.model)

    @functools.cached_property
    def _task(self):
        task = common_tasks.Mnist(f"{self._data}/tensorflow_datasets")
        if self._tuning:
            images, labels = task.train
            task.test = images[:_NUM_HELD_BACK], labels[:_NUM_HELD_BACK]
            task.train = images[_NUM_HELD_BACK:], labels[_NUM_HELD_BACK:]
        return task

    @property
    def num_examples(self):
        """Number of training images."""
        return len(self._task.train[1])

    def batch(self, seed, step, worker, workers):
        """Return images and labels."""
        size = self.recipe.batch_size
        indices, _ = shuffled(seed, step, worker, workers, size, self.num_examples)
        images, labels = self._task.train
        return images[indices], labels[indices]

    def evaluate(self, model):
        """Return the accuracy of a model."""
        return self._task.evaluate(common_tasks.predictor(model))


class Shakespeare(Task):
    """Predicts characters of Shakespeare with an LSTM of 74,385 parameters."""

    name = "shakespeare"
    metric = "loss"
    higher_is_better = False

    @functools.cached_property
    def _task(self):
        folder = f"{self._data}/tensorflow_datasets"
        task = common_tasks.Shakespeare(folder)
        if self._tuning:
            task.test = common_tasks.shakespeare(folder, "validation")
        return task

    @property
    def num_examples(self):
        """Number of sequences in the training text."""
        return len(self._task.train) // self._task.length

    @staticmethod
    def model():
        """Return the network with random weights."""
        return common_tasks.Shakespeare.model()

    def batch(self, seed, step, worker, workers):
        """Return sequences of the text, and the sequences one character later."""
        del workers  # each worker draws from the whole text
        return self._task.batch(np.random.default_rng([seed, 1, step, worker]))

    def evaluate(self, model):
        """Return the mean cross-entropy per character, in nats."""
        return self._task.evaluate(common_tasks.predictor(model))
