"""The task of `server_training.py`: MNIST with a perceptron, split between workers."""

import pathlib

import keras
import numpy as np

from tasks import small

FILE = "digits.npz"


def prepare(data_dir, folder):
    """Write the data set into a folder, from which processes can read it faster."""
    names = ["images", "labels", "test_images", "test_labels"]
    parts = [small.read("mnist", data_dir, split) for split in ("train", "test")]
    arrays = dict(zip(names, [a for part in parts for a in part], strict=True))
    np.savez(pathlib.Path(folder) / FILE, **arrays)


class Digits(small.Mnist):
    """MNIST with a perceptron of two hidden layers.

    Args:
        folder: folder of `prepare`.
        width: units of each hidden layer.
        part: index of the part of the training data to use, and number of parts.
    """

    def __init__(self, folder, width, part=(0, 1)):
        first, step = part
        with np.load(pathlib.Path(folder) / FILE) as file:
            images, labels = file["images"][first::step], file["labels"][first::step]
            self.train = images, labels.astype(np.int32)
            self.test = np.float32(file["test_images"]) / 255, file["test_labels"]
        self._width = width

    def model(self):
        """Return the network with random weights."""
        hidden = [keras.layers.Dense(self._width, activation="relu") for _ in range(2)]
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Flatten(),
                *hidden,
                keras.layers.Dense(10),
            ]
        )

    def draws(self, seed, batch_size):
        """Return a function that draws the images and labels of a step.

        Args:
            seed: seed of the examples.
            batch_size: examples of a step.
        """
        random = np.random.default_rng(seed)
        images, labels = self.train

        def draw():
            indices = random.integers(0, len(labels), batch_size)
            return np.float32(images[indices]) / 255, labels[indices]

        return draw
