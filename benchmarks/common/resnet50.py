"""The trainable variables of ResNet-50: 161 of them, 25,557,032 entries."""

import math


def shapes():
    """Return the shapes: kernel, scale and bias of each layer, then the classifier."""
    layers = _convolution(7, 3, 64)
    channels = 64
    for width, blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for block in range(blocks):
            if block == 0:
                layers += _convolution(1, channels, 4 * width)
            layers += _convolution(1, channels, width)
            layers += _convolution(3, width, width)
            layers += _convolution(1, width, 4 * width)
            channels = 4 * width
    return [*layers, (channels, 1000), (1000,)]


def sizes():
    """Return (entries, whether the tensor is uncompressed) of every variable."""
    return [(math.prod(shape), len(shape) < 2) for shape in shapes()]


def _convolution(kernel, before, after):
    """Return the shapes of a convolution and of the normalization after it."""
    return [(kernel, kernel, before, after), (after,), (after,)]
