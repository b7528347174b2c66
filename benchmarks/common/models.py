"""Models of the benchmarks, and their synthetic data."""

import keras
import numpy as np

from common.peers import PERCEPTRONS

LARGE = (1024, 6592, 10)
BATCH_SIZES = {"resnet50": 8, "resnet50_224": 16, "large": 4, "images": 1024}


def mlp():
    """Return a multi-layer perceptron of 25.08 million parameters."""
    return _mlp(*PERCEPTRONS["mlp"])


def tiny():
    """Return a perceptron that trains in a millisecond, for tests of benchmarks."""
    return _mlp(*PERCEPTRONS["tiny"])


def medium():
    """Return a perceptron of 1.01 million parameters."""
    return _mlp(*PERCEPTRONS["medium"])


def large():
    """Return a perceptron of 50.27 million parameters, without biases."""
    return _mlp(*LARGE, use_bias=False)


def cnn():
    """Return a convolutional model of 60 trainable variables.

    Layers are normalized within an example: for each moving average of a batch
    normalization the strategy would run a collective.
    """
    # Three stages of images of 16, 8 and 4 pixels square: 5 + 5 + 4 blocks.
    widths = [16] * 5 + [32] * 5 + [64] * 4
    layers = [keras.Input((32, 32, 3))]
    for before, width in zip([None, *widths], widths, strict=False):
        strides = 1 if width == before else 2
        layers += [
            keras.layers.Conv2D(width, 3, strides, padding="same"),
            keras.layers.LayerNormalization(),
            keras.layers.Activation("relu"),
        ]
    layers += [
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers)


def images():
    """Return the convolutional model, for large batches.

    With these, a step's computation takes long in comparison with its exchange.
    """
    return cnn()


def resnet50():
    """Return ResNet-50 of `keras.applications`, for images of 64 pixels square."""
    return _resnet50(64)


def resnet50_224():
    """Return ResNet-50 for images of the usual 224 pixels square."""
    return _resnet50(224)


MODELS = {
    **{"tiny": tiny, "medium": medium, "mlp": mlp, "large": large},
    **{"cnn": cnn, "images": images},
    **{"resnet50": resnet50, "resnet50_224": resnet50_224},
}


def data(model, seed, batch_size):
    """Return one batch, used in every step: images or vectors, and classes."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((batch_size, *model.input_shape[1:]), np.float32)
    return x, random.integers(0, model.output_shape[1], batch_size)


def _resnet50(pixels):
    return keras.applications.ResNet50(
        weights=None, input_shape=(pixels, pixels, 3), classifier_activation=None
    )


def _mlp(inputs, units, classes, use_bias=True):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(units, activation="relu", use_bias=use_bias),
            keras.layers.Dense(units, activation="relu", use_bias=use_bias),
            keras.layers.Dense(classes),
        ]
    )
