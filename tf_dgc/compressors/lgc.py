"""LGC: values compressed by an autoencoder that learns from earlier gradients."""

import itertools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import (
    check_number,
    check_sparsity,
    check_steps,
    check_whole,
)
from tf_dgc.codecs import elias_fano
from tf_dgc.codecs.bits import to_words
from tf_dgc.codecs.checks import require
from tf_dgc.collectives.requests import (
    Aggregation,
    AllGather,
    AllReduce,
    Result,
    SparseEntries,
    TensorRequest,
)
from tf_dgc.compressors.base import Compressor, StateSpec
from tf_dgc.compressors.common.largest import top_k
from tf_dgc.compressors.common.one_round import from_words
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent, tie_offset

# An autoencoder of vectors with five convolutions each way, trained by Adam. All
# weights are one vector, so that they are one state. Convolutions are matrix products,
# whose sums have the same order in every run.

STRIDE = 16
"""Entries of a vector that `CODE` numbers of its code represent."""

CODE = 4
"""Channels of the code."""

_SLOPE = 0.01  # of the leaky ReLU


class AutoencoderLayer(NamedTuple):
    """One convolution.

    Attributes:
        width: width of the kernel.
        inputs: number of input channels.
        outputs: number of output channels.
    """

    width: int
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return (self.width * self.inputs + 1) * self.outputs


def layers(channels: int) -> list[AutoencoderLayer]:
    """Return the layers: five of the encoder, then five of the decoder.

    Args:
        channels: number of channels of the first layer; 64 in the paper.
    """
    c, half = channels, max(1, channels // 2)
    down = [1, c, 2 * c, 4 * c, c]
    up = [CODE, half, c, 2 * c, half]
    encoder = [AutoencoderLayer(3, *pair) for pair in itertools.pairwise(down)]
    decoder = [AutoencoderLayer(3, *pair) for pair in itertools.pairwise(up)]
    return [
        *encoder,
        AutoencoderLayer(1, c, CODE),
        *decoder,
        AutoencoderLayer(1, half, 1),
    ]


def num_weights(channels: int) -> int:
    """Return the length of the vector of all weights."""
    return sum(layer.size for layer in layers(channels))


def initial_weights(
    channels: int, rng: np.random.Generator
) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return random kernels of He's variance, and biases of 0."""
    parts = []
    for layer in layers(channels):
        fan = layer.width * layer.inputs
        parts.append(rng.normal(size=(fan, layer.outputs)) * np.sqrt(2 / fan))
        parts.append(np.zeros(layer.outputs))
    return np.concatenate([part.ravel() for part in parts])


def code_length(size: int) -> int:
    """Return the length of the code of a vector of `size` entries."""
    return CODE * -(-size // STRIDE)


def encode_vectors(weights: tf.Tensor, channels: int, vectors: tf.Tensor) -> tf.Tensor:
    """Return codes, `[N, code_length(k)]`, of vectors, `[N, k]`."""
    count, size = vectors.shape
    missing = -size % STRIDE
    x = tf.pad(vectors, [[0, 0], [0, missing]])[:, :, tf.newaxis]
    kernels = _split(weights, layers(channels))[:5]
    for kernel, bias in kernels[:-1]:
        x = _leaky(_convolve(x, kernel, bias, 2))
    return tf.reshape(_convolve(x, *kernels[-1], 1), [count, code_length(size)])


def decode_vectors(
    weights: tf.Tensor, channels: int, codes: tf.Tensor, size: int
) -> tf.Tensor:
    """Return vectors, `[N, size]`, of codes, `[N, code_length(size)]`."""
    x = tf.reshape(codes, [codes.shape[0], -1, CODE])
    kernels = _split(weights, layers(channels))[5:]
    for kernel, bias in kernels[:-1]:
        x = _leaky(_convolve(_spread(x), kernel, bias, 1))
    return _convolve(x, *kernels[-1], 1)[:, :size, 0]


def mean_through_code(
    weights: tf.Tensor, channels: int, vectors: tf.Tensor
) -> tf.Tensor:
    """Return the decoded mean, `[k]`, of the codes of vectors, `[N, k]`."""
    code = tf.reduce_mean(
        encode_vectors(weights, channels, vectors), axis=0, keepdims=True
    )
    return decode_vectors(weights, channels, code, vectors.shape[1])[0]


class AutoencoderAdam(NamedTuple):
    """Weights of the autoencoder and Adam's moments.

    Attributes:
        weights: weights, float `[num_weights]`.
        first: first moment, float `[num_weights]`.
        second: second moment, float `[num_weights]`.
    """

    weights: tf.Tensor
    first: tf.Tensor
    second: tf.Tensor


def train_autoencoder(
    state: AutoencoderAdam,
    channels: int,
    vectors: tf.Tensor,
    rate: float,
    steps: tf.Tensor,
) -> AutoencoderAdam:
    """Train `mean_through_code` to return the mean, for one step.

    Args:
        state: weights and moments before the step.
        channels: number of channels of the first layer, as in `layers`.
        vectors: values of all workers, float `[N, k]`.
        rate: learning rate, above 0.
        steps: number of previous steps, a scalar integer tensor.
    """
    target = tf.reduce_mean(vectors, axis=0)
    with tf.GradientTape() as tape:
        tape.watch(state.weights)
        output = mean_through_code(state.weights, channels, vectors)
        loss = tf.reduce_mean(tf.square(output - target))
    gradient = tape.gradient(loss, state.weights)
    count = tf.cast(steps + 1, gradient.dtype)
    first = 0.9 * state.first + 0.1 * gradient
    second = 0.999 * state.second + 0.001 * tf.square(gradient)
    size = tf.sqrt(second / (1 - tf.pow(tf.cast(0.999, count.dtype), count)))
    mean = first / (1 - tf.pow(tf.cast(0.9, count.dtype), count))
    return AutoencoderAdam(state.weights - rate * mean / (size + 1e-8), first, second)


def _split(
    weights: tf.Tensor, parts: Sequence[AutoencoderLayer]
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return kernel, `[width * inputs, outputs]`, and bias of every layer."""
    split = []
    layer_weights = tf.split(weights, [layer.size for layer in parts])
    for layer, vector in zip(parts, layer_weights, strict=True):
        matrix = tf.reshape(vector, [-1, layer.outputs])
        split.append((matrix[:-1], matrix[-1]))
    return split


def _convolve(
    x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor, stride: int
) -> tf.Tensor:
    """Return `[N, length / stride, outputs]` of `[N, length, inputs]`, zero-padded."""
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


_DENSE, _LEARNING = 0, 1  # phases; 2 is the coded phase
_CLIP = 8.0  # limit of values, in units of the leader's largest entry


@keras.saving.register_keras_serializable(package="tf_dgc")
class LGC(Compressor):
    """Learned gradient compression, the variant for all-reduce.

    Abrahamyan et al., section on ring-allreduce (LGC_RAR). In every step a random
    worker leads, and all workers send their values at the positions of the leader's k
    largest entries. There are three phases:

    1. *Dense*, for `dense_steps`: all entries are summed.
    2. *Learning*, for `learning_steps`: the k values of all workers are gathered, and
       every worker takes the same step of Adam to bring `D(mean of E(x_m))` closer to
       the mean of the x_m.
    3. *Coded*: an all-reduce sums the codes `E(x_m)`; the result is `N D(sum / N)`.

    The encoder E has five convolutions of widths 3, 3, 3, 3, 1, strides 2, 2, 2, 2, 1
    and channels c, 2c, 4c, c, 4; the decoder D mirrors it (c/2, c, 2c, c/2 and 1
    channels, strides of 1/2). Activations are leaky ReLU. The code of 16 values has 4
    numbers. With c = 64, as in the paper, there are 216,677 weights and twice as many
    moments; with c = 8 there are 3,569 weights, which learn less.

    A payload has k positions by Elias-Fano, about `2 + log2(n / k)` bits each, and the
    scale, except in dense steps; then all entries, or k values, or `4 ceil(k / 16)`
    numbers. In the coded phase that is 2.5 bytes per sent entry at 99.9 %. There are
    three rounds, some of them empty.

    Differences from the paper:

    - The k entries are the largest of all tensors together, as for `GlobalTopK`, not of
      each. With fewer than `min_values` entries the autoencoder is not used: the second
      phase has no end.
    - All workers train the autoencoder, on the same values, so its weights are never
      sent.
    - Values are divided by the leader's largest value, which is sent along, and clipped
      to 8 times that, so that codes do not depend on the scale.
    - There is no broadcast: all workers send positions, and the leader's are used.
    - Only the sum can be decoded, so a worker does not know exactly which of its values
      arrived. With `keep_loss` it assumes `D(E(x_m))`, and keeps the rest in its
      residual (or nothing, if that is further from x_m than 0). Otherwise coded values
      are removed from the residual, and the autoencoder's error is lost. In our trials
      the loss fell as in dense training with `keep_loss`, and more slowly without.

    If fewer than k entries are nonzero, zeros are coded, too, and decoded as small
    numbers: weights without a gradient may change.

    The variant for parameter servers (LGC_PS) is not implemented. It codes all values
    of one worker, and of the others only an innovation (their few largest values), from
    which a decoder per worker restores the values. The state of a method here cannot
    depend on the number of workers, so there cannot be N decoders; and the variant
    saves time at a server, which decodes once, whereas here every worker would decode N
    times.

    Args:
        sparsity: share of entries not sent after the dense phase, in [0, 1).
        dense_steps: number of steps of phase 1.
        learning_steps: number of steps of phase 2.
        channels: number of channels c of the autoencoder's first layer.
        learning_rate: learning rate of Adam, above 0.
        min_values: least number of sent entries for which the autoencoder is used.
        keep_loss: whether the residual keeps the estimated error of coding.
    """

    name = "lgc"
    kind = "learned"
    reference = "Abrahamyan et al., Learned gradient compression, TNNLS 2021"
    additive = False
    entire_model = True

    def __init__(
        self,
        sparsity: float = 0.999,
        dense_steps: int = 200,
        learning_steps: int = 300,
        channels: int = 64,
        learning_rate: float = 1e-3,
        min_values: int = 64,
        keep_loss: bool = True,
    ):
        self.sparsity = check_sparsity(sparsity)
        self.dense_steps = check_steps("dense_steps", dense_steps, 0)
        self.learning_steps = check_steps("learning_steps", learning_steps)
        self.channels = check_whole("channels", channels)
        self.min_values = check_whole("min_values", min_values)
        self.learning_rate = check_number("learning_rate", learning_rate, "(0, inf)")
        self.keep_loss = bool(keep_loss)

    def common_state(self) -> dict[str, StateSpec]:
        """Return the autoencoder's weights and Adam's moments."""
        size = (num_weights(self.channels),)
        return {
            "weights": StateSpec(
                size, False, lambda rng: initial_weights(self.channels, rng)
            ),
            "first": StateSpec(size, False),
            "second": StateSpec(size, False),
        }

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> None:
        """Return None, as it depends on the phase."""
        del shape, dtype

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Find the leader's positions, then send according to the phase."""
        values = tf.reshape(values, [-1])
        size = values.shape[0]
        k = num_sent(size, self.sparsity)
        phase = self._phase(keys.step, k)
        leader_positions, scale = yield from _leader_positions(values, k, phase, keys)
        x = tf.gather(values, leader_positions)
        unit = _normalized(x, scale)
        x_by_worker = yield from _gather_in_learning(x, phase)
        model = None
        if self._uses_autoencoder(k):
            model = AutoencoderAdam(*(state[n] for n in AutoencoderAdam._fields))
        summand = tf.switch_case(
            phase,
            [lambda: values, lambda: x[:0], lambda: self._encode(model, unit)],
        )
        total = yield AllReduce(summand)
        num_workers = x_by_worker.shape[0]

        def dense_entries() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            return tf.range(size), total, values

        def learning_entries() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            return leader_positions, tf.reduce_sum(x_by_worker, axis=0), x

        def coded_entries() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            # Sliced, or TensorFlow infers this length for the other phases, too.
            length = code_length(k) if model else k
            codes = tf.stack([total[:length] / num_workers, summand[:length]])
            mean, mine = tf.unstack(self._decode(model, codes, k))
            sent = self._estimate_sent(unit, mine)
            return leader_positions, num_workers * (mean * scale), sent * scale

        positions, sums, sent = tf.switch_case(
            phase, [dense_entries, learning_entries, coded_entries]
        )
        result = Result(
            SparseEntries(positions, sums, size),
            SparseEntries(positions, sent, size),
            entries=tf.size(positions),
        )
        if model is None:
            return result
        units = _normalized(x_by_worker, scale)
        steps = keys.step - self.dense_steps
        model = tf.cond(
            tf.equal(phase, _LEARNING),
            lambda: train_autoencoder(
                model, self.channels, units, self.learning_rate, steps
            ),
            lambda: model,
        )
        return result._replace(state=model._asdict())

    def _phase(self, step: tf.Tensor, k: int) -> tf.Tensor:
        """Return the phase, a scalar int32."""
        step = tf.cast(step, tf.int64)
        learning = tf.cast(step >= self.dense_steps, tf.int32)
        if not self._uses_autoencoder(k):
            return learning
        coded = step >= self.dense_steps + self.learning_steps
        return learning + tf.cast(coded, tf.int32)

    def _uses_autoencoder(self, k: int) -> bool:
        return k >= self.min_values and code_length(k) < k

    def _encode(self, model: AutoencoderAdam | None, unit: tf.Tensor) -> tf.Tensor:
        if model is None:
            return unit
        return encode_vectors(model.weights, self.channels, unit[tf.newaxis])[0]

    def _decode(
        self, model: AutoencoderAdam | None, codes: tf.Tensor, k: int
    ) -> tf.Tensor:
        if model is None:
            return tf.ensure_shape(codes, [None, k])
        codes = tf.ensure_shape(codes, [None, code_length(k)])
        return decode_vectors(model.weights, self.channels, codes, k)

    def _estimate_sent(self, unit: tf.Tensor, decoded: tf.Tensor) -> tf.Tensor:
        """Return the values that a worker assumes to have sent."""
        if not self.keep_loss:
            return unit
        is_worse_than_zero = tf.norm(unit - decoded) >= tf.norm(unit)
        return tf.where(is_worse_than_zero, unit, decoded)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "sparsity": self.sparsity,
            "dense_steps": self.dense_steps,
            "learning_steps": self.learning_steps,
            "channels": self.channels,
            "learning_rate": self.learning_rate,
            "min_values": self.min_values,
            "keep_loss": self.keep_loss,
        }


def _leader_positions(
    values: tf.Tensor, k: int, phase: tf.Tensor, keys: RandomKeys
) -> Generator[TensorRequest, tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
    """Return the leader's positions, int32 `[k]`, and its largest magnitude."""
    size = values.shape[0]
    positions, largest = top_k(values, k, tie_offset(size, keys))
    scale = to_words(tf.reduce_max(tf.abs(largest))[tf.newaxis])
    mine = tf.concat([scale, elias_fano.encode(positions, size, k)], axis=0)
    length = mine.shape[0]
    is_dense = tf.equal(phase, _DENSE)
    gathered = yield AllGather(mine[: tf.where(is_dense, 0, length)])
    leader = tf.random.stateless_uniform(
        [], keys.shared(1), maxval=gathered.shape[0], dtype=tf.int32
    )
    missing = length - tf.shape(gathered)[1]
    padded = tf.pad(gathered, [[0, 0], [0, missing]])
    # The dense phase gathers nothing, and does not use the positions: any will do.
    words = tf.where(is_dense, mine, padded[leader])
    split = scale.shape[0]
    positions, checks = elias_fano.decode(words[tf.newaxis, split:], size, k)
    positions = require(checks, positions)
    return positions[0], from_words(words[:split], values.dtype, [])


def _gather_in_learning(
    x: tf.Tensor, phase: tf.Tensor
) -> Generator[TensorRequest, tf.Tensor, tf.Tensor]:
    """Return all workers' values, `[N, k]`, in the learning phase; else zeros."""
    words = to_words(x)
    length = words.shape[0]
    is_learning = tf.equal(phase, _LEARNING)
    gathered = yield AllGather(words[: tf.where(is_learning, length, 0)])
    num_workers = gathered.shape[0]
    missing = length - tf.shape(gathered)[1]
    padded = tf.pad(gathered, [[0, 0], [0, missing]])
    padded = tf.ensure_shape(padded, [num_workers, length])
    return from_words(tf.reshape(padded, [-1]), x.dtype, [num_workers, x.shape[0]])


def _normalized(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Return clipped values in units of the scale; zeros if it is 0."""
    return tf.clip_by_value(tf.math.divide_no_nan(x, scale), -_CLIP, _CLIP)
