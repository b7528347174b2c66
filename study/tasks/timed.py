"""The tasks of `time_to_accuracy.py`: CIFAR-10, and MNIST with a wide perceptron."""

import pathlib

import numpy as np

from tasks import cifar, digits, small
from tasks.recipes import RECIPES

_PHOTOS = "photos.npz"


def prepare(names, data_dir, folder):
    """Write the data sets into a folder, from which processes can read them faster.

    Args:
        names: names in `TASKS`.
        data_dir: folder of TensorFlow Datasets.
        folder: folder of the new files.
    """
    for name in names:
        TASKS[name].prepare(data_dir, folder)


class Photos(cifar.Cifar10):
    """CIFAR-10 with a residual network of 172,506 parameters.

    Args:
        folder: folder of `prepare`.
        width: unused by this task.
        part: index of the worker, and number of workers.
    """

    def __init__(self, folder, width=None, part=(0, 1)):
        del width
        super().__init__(folder)
        self._part = part
        with np.load(pathlib.Path(folder) / _PHOTOS) as file:
            self.train = cifar.padded(file["images"]), file["labels"]
            self.test = file["test_images"], file["test_labels"]

    @staticmethod
    def prepare(data_dir, folder):
        """Write the file that instances read."""
        arrays = {}
        for split, prefix in (("train", ""), ("test", "test_")):
            images, labels = cifar.standardized(*small.read("cifar10", data_dir, split))
            arrays |= {f"{prefix}images": images, f"{prefix}labels": labels}
        np.savez(pathlib.Path(folder) / _PHOTOS, **arrays)

    def draws(self, seed, batch_size):
        """Return a function that draws the images and labels of a step."""
        assert batch_size == self.recipe.batch_size
        step = -1

        def draw():
            nonlocal step
            step += 1
            return self.batch(seed, step, *self._part)

        return draw

    evaluate = cifar.Cifar10.accuracy  # takes `predict`, like `small.Task.evaluate`


class Digits(digits.Digits):
    """MNIST with a perceptron, whose gradient is large relative to its computation."""

    name = "digits"
    recipe = RECIPES["mnist"]
    prepare = staticmethod(digits.prepare)


TASKS = {task.name: task for task in (Photos, Digits)}
