"""An autoencoder of vectors: five convolutions each way, trained by Adam.

Everything is a function of tensors, and all weights are one vector, so that they are
one state. Convolutions are matrix products, whose sums have the same order in every
run.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

STRIDE = 16
"""Entries of a vector for which there are `CODE` numbers in its code."""

CODE = 4
"""Channels of the code."""

_SLOPE = 0.01  # of leaky ReLU


class Layer(NamedTuple):
    """One convolution.

    Attributes:
        width: number of entries that the kernel covers.
        inputs: number of channels that go in.
        outputs: number of channels that come out.
    """

    width: int
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return (self.width * self.inputs + 1) * self.outputs


def layers(channels: int) -> list[Layer]:
    """Return the layers: five of the encoder, then five of the decoder.

    Args:
        channels: number of channels of the first layer; 64 in the paper.
    """
    c, half = channels, max(1, channels // 2)
    down = [1, c, 2 * c, 4 * c, c]
    up = [CODE, half, c, 2 * c, half]
    encoder = [Layer(3, *pair) for pair in itertools.pairwise(down)]
    decoder = [Layer(3, *pair) for pair in itertools.pairwise(up)]
    return [*encoder, Layer(1, c, CODE), *decoder, Layer(1, half, 1)]


def num_weights(channels: int) -> int:
    """Return the length of the vector of all weights."""
    return sum(layer.size for layer in layers(channels))


def initial(channels: int, rng: np.random.Generator) -> np.ndarray:
    """Return weights of He's variance for the slope, and biases of 0."""
    parts = []
    for layer in layers(channels):
        fan = layer.width * layer.inputs
        parts.append(rng.normal(size=(fan, layer.outputs)) * np.sqrt(2 / fan))
        parts.append(np.zeros(layer.outputs))
    return np.concatenate([part.ravel() for part in parts])


def code_length(size: int) -> int:
    """Return how many numbers the code of a vector has."""
    return CODE * -(-size // STRIDE)


def encode(weights: tf.Tensor, channels: int, vectors: tf.Tensor) -> tf.Tensor:
    """Return codes, `[N, code_length(k)]`, of vectors, `[N, k]`."""
    count, size = vectors.shape
    missing = -size % STRIDE
    x = tf.pad(vectors, [[0, 0], [0, missing]])[:, :, tf.newaxis]
    kernels = _split(weights, layers(channels))[:5]
    for kernel, bias in kernels[:-1]:
        x = _leaky(_convolve(x, kernel, bias, 2))
    return tf.reshape(_convolve(x, *kernels[-1], 1), [count, code_length(size)])


def decode(weights: tf.Tensor, channels: int, codes: tf.Tensor, size: int) -> tf.Tensor:
    """Return vectors, `[N, size]`, of codes, `[N, code_length(size)]`."""
    x = tf.reshape(codes, [codes.shape[0], -1, CODE])
    kernels = _split(weights, layers(channels))[5:]
    for kernel, bias in kernels[:-1]:
        x = _leaky(_convolve(_spread(x), kernel, bias, 1))
    return _convolve(x, *kernels[-1], 1)[:, :size, 0]


def mean_through_code(
    weights: tf.Tensor, channels: int, vectors: tf.Tensor
) -> tf.Tensor:
    """Return what the mean of the codes of vectors, `[N, k]`, decodes to, `[k]`."""
    code = tf.reduce_mean(encode(weights, channels, vectors), axis=0, keepdims=True)
    return decode(weights, channels, code, vectors.shape[1])[0]


class Adam(NamedTuple):
    """What is learned, and Adam's moments.

    Attributes:
        weights: weights of the autoencoder, float `[num_weights]`.
        first: moment of the gradient, likewise.
        second: moment of the squared gradient, likewise.
    """

    weights: tf.Tensor
    first: tf.Tensor
    second: tf.Tensor


def train(
    state: Adam, channels: int, vectors: tf.Tensor, rate: float, steps: tf.Tensor
) -> Adam:
    """Return the state after one step to bring `mean_through_code` to the mean.

    Args:
        state: weights and moments before the step.
        channels: number of channels of the first layer, as in `layers`.
        vectors: values of all workers, float `[N, k]`.
        rate: learning rate, above 0.
        steps: number of steps done before, a scalar integer tensor.
    """
    target = tf.reduce_mean(vectors, axis=0)
    with tf.GradientTape() as tape:
        tape.watch(state.weights)
        found = mean_through_code(state.weights, channels, vectors)
        loss = tf.reduce_mean(tf.square(found - target))
    gradient = tape.gradient(loss, state.weights)
    count = tf.cast(steps + 1, gradient.dtype)
    first = 0.9 * state.first + 0.1 * gradient
    second = 0.999 * state.second + 0.001 * tf.square(gradient)
    size = tf.sqrt(second / (1 - tf.pow(tf.cast(0.999, count.dtype), count)))
    mean = first / (1 - tf.pow(tf.cast(0.9, count.dtype), count))
    return Adam(state.weights - rate * mean / (size + 1e-8), first, second)


def _split(
    weights: tf.Tensor, parts: Sequence[Layer]
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return kernel, `[width * inputs, outputs]`, and bias of every layer."""
    split = []
    for part, layer in zip(
        tf.split(weights, [layer.size for layer in parts]), parts, strict=True
    ):
        matrix = tf.reshape(part, [-1, layer.outputs])
        split.append((matrix[:-1], matrix[-1]))
    return split


def _convolve(
    x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, stride: int
) -> tf.Tensor:
    """Return `[N, length / stride, outputs]` of `[N, length, inputs]`, zeros around."""
    count, length, inputs = x.shape
    width = kernel.shape[0] // inputs
    padded = tf.pad(x, [[0, 0], [width // 2, width // 2], [0, 0]])
    taps = [padded[:, i : i + length : stride] for i in range(width)]
    rows = tf.reshape(tf.concat(taps, axis=2), [-1, kernel.shape[0]])
    return tf.reshape(
        tf.linalg.matmul(rows, kernel) + bias, [count, length // stride, -1]
    )


def _spread(x: tf.Tensor) -> tf.Tensor:
    """Return `[N, 2 length, channels]`, with zeros between entries.

    A convolution of this is a transposed convolution of stride 2.
    """
    count, length, channels = x.shape
    return tf.reshape(
        tf.stack([x, tf.zeros_like(x)], axis=2), [count, 2 * length, channels]
    )


def _leaky(x: tf.Tensor) -> tf.Tensor:
    return tf.maximum(x, _SLOPE * x)
