"""CIFAR-10 with a residual network of 6n + 2 layers."""

import functools

import keras
import numpy as np

from tasks.recipe_task import Task, shuffled
from tasks.small import predictor, read

_NUM_HELD_BACK = 5_000
_PADDING = 4


class Cifar10(Task):
    """Classifies photographs with a residual network of He et al. (2016), section 4.2.

    Shortcuts have no parameters: where the resolution halves, they take every second
    pixel and pad with channels of zeros. Images are standardized by channel, shifted by
    up to 4 pixels and mirrored, as in the paper. Unlike in the paper, the first
    convolution may have a stride of 2, which makes a step four times as cheap.

    Args:
        data: see `Task`.
        tuning: see `Task`.
        blocks: number of residual blocks per stage, n.
        width: number of channels of the first stage, 16 in the paper.
        stride: stride of the first convolution, 1 in the paper.
    """

    name = "cifar10"
    metric = "accuracy"
    higher_is_better = True

    def __init__(self, data, tuning=False, blocks=2, width=16, stride=2):
        super().__init__(data, tuning)
        self._blocks, self._width, self._stride = blocks, width, stride

    @functools.cached_property
    def train(self):
        """Padded training images, and labels."""
        images, labels = _part(self._data, "train", self._tuning)
        return padded(images), labels

    @functools.cached_property
    def test(self):
        """Test images and labels, or held-back training images when tuning."""
        return _part(self._data, "test", self._tuning)

    @property
    def num_examples(self):
        """Number of training images."""
        return len(self.train[1])

    def model(self):
        """Return the network with random weights."""
        inputs = keras.Input((32, 32, 3))
        x = _normalized(_convolution(self._width, self._stride)(inputs))
        x = keras.layers.ReLU()(x)
        for stage in range(3):
            for block in range(self._blocks):
                strides = 2 if stage and not block else 1
                x = _block(x, self._width * 2**stage, strides)
        x = keras.layers.GlobalAveragePooling2D()(x)
        return keras.Model(inputs, keras.layers.Dense(10)(x))

    def batch(self, seed, step, worker, workers):
        """Return images, shifted and mirrored, and labels."""
        size = self.recipe.batch_size
        indices, random = shuffled(seed, step, worker, workers, size, self.num_examples)
        shifts = random.integers(0, 2 * _PADDING + 1, (size, 2))
        mirrored = random.integers(0, 2, size)
        padded, labels = self.train
        images = np.empty((size, 32, 32, 3), np.float32)
        for i, (index, (y, x)) in enumerate(zip(indices, shifts, strict=True)):
            image = padded[index, y : y + 32, x : x + 32]
            images[i] = image[:, ::-1] if mirrored[i] else image
        return images, labels[indices]

    def evaluate(self, model):
        """Return the accuracy of a model."""
        return self.accuracy(predictor(model))

    def accuracy(self, predict):
        """Return the accuracy of a function from images to logits."""
        images, labels = self.test
        return float(np.mean(np.argmax(predict(images), axis=-1) == labels))


def _block(x, width, strides):
    y = _normalized(_convolution(width, strides)(x))
    y = keras.layers.ReLU()(y)
    y = _normalized(_convolution(width)(y))
    return keras.layers.ReLU()(keras.layers.Add()([_shortcut(x, width, strides), y]))


def _shortcut(x, width, strides):
    if strides == 1:
        return x
    missing = width - x.shape[-1]
    return keras.ops.pad(
        x[:, ::strides, ::strides], [(0, 0), (0, 0), (0, 0), (0, missing)]
    )


def _convolution(width, strides=1):
    return keras.layers.Conv2D(
        width,
        3,
        strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )


def _normalized(x):
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def _part(data, part, tuning):
    images, labels = _images(data, "train" if tuning else part)
    if not tuning:
        return images, labels
    if part == "train":
        return images[_NUM_HELD_BACK:], labels[_NUM_HELD_BACK:]
    return images[:_NUM_HELD_BACK], labels[:_NUM_HELD_BACK]


@functools.cache
def _images(data, split):
    return standardized(*read("cifar10", f"{data}/tensorflow_datasets", split))


def standardized(images, labels):
    """Return images with mean 0 and deviation 1 per channel, and labels."""
    mean = np.float32([0.4914, 0.4822, 0.4465])
    deviation = np.float32([0.2470, 0.2435, 0.2616])
    return (np.float32(images) / 255 - mean) / deviation, np.int32(labels)


def padded(images):
    """Return images padded with zeros, so that they can be shifted."""
    padding = [(0, 0), (_PADDING, _PADDING), (_PADDING, _PADDING), (0, 0)]
    return np.pad(images, padding)
