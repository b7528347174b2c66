"""The tasks of `convergence.py`, MNIST and Shakespeare, trained to their end."""

import functools

import numpy as np

from tasks import small as common_tasks
from tasks.recipe_task import Task, shuffled

_HELD_BACK = 5_000


class Mnist(Task):
    """Digits, by a convolutional network of 80,202 parameters; see `Task`."""

    name = "mnist"
    metric = "accuracy"
    higher_is_better = True
    model = staticmethod(common_tasks.Mnist.model)

    @functools.cached_property
    def _task(self):
        task = common_tasks.Mnist(f"{self._data}/tensorflow_datasets")
        if self._tuning:
            images, labels = task.train
            task.test = images[:_HELD_BACK], labels[:_HELD_BACK]
            task.train = images[_HELD_BACK:], labels[_HELD_BACK:]
        return task

    @property
    def num_examples(self):
        """Number of images of a pass."""
        return len(self._task.train[1])

    def batch(self, seed, step, worker, workers):
        """Return images and labels."""
        size = self.recipe.batch_size
        chosen, _ = shuffled(seed, step, worker, workers, size, self.num_examples)
        images, labels = self._task.train
        return images[chosen], labels[chosen]

    def evaluate(self, model):
        """Return the share of the images that is classified correctly."""
        return self._task.evaluate(common_tasks.predictor(model))


class Shakespeare(Task):
    """Characters of Shakespeare, by an LSTM of 74,385 parameters; see `Task`."""

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
        """Number of pieces of a pass."""
        return len(self._task.train) // self._task.length

    @staticmethod
    def model():
        """Return the network, with weights drawn anew."""
        return common_tasks.Shakespeare.model()

    def batch(self, seed, step, worker, workers):
        """Return pieces of the text, and the same one character later."""
        del workers  # everyone draws for itself
        return self._task.batch(np.random.default_rng([seed, 1, step, worker]))

    def evaluate(self, model):
        """Return the mean cross-entropy of a character, in nats."""
        return self._task.evaluate(common_tasks.predictor(model))
