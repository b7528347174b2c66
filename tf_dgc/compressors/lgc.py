"""LGC: values that an autoencoder has compressed, learned from earlier gradients."""

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
from tf_dgc.compressors.common.one_round import from_words, to_words
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent, tie_offset

# --- An autoencoder of vectors: five convolutions each way, trained by Adam.
#
# Everything is a function of tensors, and all weights are one vector, so that they are
# one state. Convolutions are matrix products, whose sums have the same order in every
# run.

STRIDE = 16
"""Entries of a vector for which there are `CODE` numbers in its code."""

CODE = 4
"""Channels of the code."""

_SLOPE = 0.01  # of leaky ReLU


class AutoencoderLayer(NamedTuple):
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


def initial_weights(channels: int, rng: np.random.Generator) -> np.ndarray:
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
    """Return what the mean of the codes of vectors, `[N, k]`, decodes to, `[k]`."""
    code = tf.reduce_mean(
        encode_vectors(weights, channels, vectors), axis=0, keepdims=True
    )
    return decode_vectors(weights, channels, code, vectors.shape[1])[0]


class AutoencoderAdam(NamedTuple):
    """What is learned, and Adam's moments.

    Attributes:
        weights: weights of the autoencoder, float `[num_weights]`.
        first: moment of the gradient, likewise.
        second: moment of the squared gradient, likewise.
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
    return AutoencoderAdam(state.weights - rate * mean / (size + 1e-8), first, second)


def _split(
    weights: tf.Tensor, parts: Sequence[AutoencoderLayer]
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


_DENSE, _LEARNING = 0, 1  # and 2, in which all is coded
_WIDEST = 8.0  # times the leader's largest entry


@keras.saving.register_keras_serializable(package="tf_dgc")
class LGC(Compressor):
    """Learned gradient compression, the variant for all-reduce.

    Abrahamyan et al., section on ring-allreduce (LGC_RAR). In every step one worker,
    drawn anew, is the leader, and everyone sends values at the positions of the
    leader's k largest entries. Three phases, by the number of the step:

    1. *Dense*, for `dense_steps`: all entries are summed.
    2. *Learning*, for `learning_steps`: the k values are exchanged as they are. Every
       worker has those of all, and takes the same step of Adam to bring
       `D(mean of E(x_m))` nearer to the mean of the x_m.
    3. *Coded*: codes `E(x_m)` are summed by all-reduce; `N D(sum / N)` arrives.

    E has five convolutions of widths 3, 3, 3, 3, 1, strides 2, 2, 2, 2, 1 and channels
    c, 2c, 4c, c, 4; D mirrors it (c/2, c, 2c, c/2 and 1 channels, strides of 1/2).
    16 values make a code of 4 numbers. Between layers is leaky ReLU. With c = 64, as
    in the paper, there are 216,677 weights, and as many of each of Adam's two moments;
    with c = 8 there are 3,569, which learn less.

    On the wire: k positions by Elias-Fano, about `2 + log2(n / k)` bits each, and the
    scale, in every step but dense ones; then all entries, or k values, or
    `4 ceil(k / 16)` numbers: 2.5 bytes per entry sent at 99.9 % in the coded phase.
    Three rounds, some of them empty.

    Where this is not the paper:

    - The k entries are the largest of all tensors together, as for `GlobalTopK`, not
      so many of each. If they are fewer than `min_values`, their autoencoder is never
      used: the second phase has no end.
    - All workers train the autoencoder, on the same values, so its weights are never
      sent.
    - Values are divided by the leader's largest, which is sent along, and cut off at 8
      times that, so that a code means the same from all workers, whatever the scale.
    - There is no broadcast: everyone hands over positions, and the leader's are used.
    - Only the sum can be decoded, so no worker knows exactly what of its own arrived.
      With `keep_loss`, it assumes `D(E(x_m))` did, and the rest stays in its residual
      (or nothing, if that is further from x_m than 0 is). Without, what was coded is
      cleared from the residual, and what the autoencoder loses is lost for good. In
      our trials the loss fell as in dense training with it, and stayed behind without.

    If fewer than k entries are not 0, zeros are coded too, and D makes small numbers of
    them: rows without a gradient may move.

    The variant for parameter servers (LGC_PS) is not here. It codes the values of one
    worker, and of the others only an innovation (their largest few), from which a
    decoder of each worker's own restores its values. A method here knows nothing of the
    number of workers when its state is made, so it cannot have N decoders; and it saves
    on the way to a server, which decodes once, while here everyone would, N times.

    Args:
        sparsity: share of entries not sent after the dense phase, in [0, 1).
        dense_steps: number of steps of phase 1.
        learning_steps: number of steps of phase 2.
        channels: number of channels c of the autoencoder's first layer.
        learning_rate: learning rate of Adam, above 0.
        min_values: number of entries that must be sent for them to be coded.
        keep_loss: whether to keep in the residual what coding loses, as far as is
            known.
    """

    name = "lgc"
    kind = "learned"
    reference = "Abrahamyan et al., Learned gradient compression, TNNLS 2021"
    additive = False
    together = True
    conserves = False

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
        """Return the autoencoder's weights and Adam's moments, alike on all workers."""
        size = (num_weights(self.channels),)
        return {
            "weights": StateSpec(
                size, False, lambda rng: initial_weights(self.channels, rng)
            ),
            "first": StateSpec(size, False),
            "second": StateSpec(size, False),
        }

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> None:
        """Return None: it depends on the phase."""
        del shape, dtype

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Agree on positions, and send by phase."""
        values = tf.reshape(values, [-1])
        size = values.shape[0]
        k = num_sent(size, self.sparsity)
        phase = self._phase(keys.step, k)
        where, scale = yield from self._lead(values, k, phase, keys)
        x = tf.gather(values, where)
        unit = _divided(x, scale)
        everyone = yield from _share(x, phase)
        model = (
            AutoencoderAdam(*(state[n] for n in AutoencoderAdam._fields))
            if self._codes(k)
            else None
        )
        handed_over = tf.switch_case(
            phase,
            [lambda: values, lambda: x[:0], lambda: self._encode(model, unit)],
        )
        total = yield AllReduce(handed_over)
        number = everyone.shape[0]

        def coded() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            # Cut, or TensorFlow takes their length for known in the other phases too.
            length = code_length(k) if model else k
            codes = tf.stack([total[:length] / number, handed_over[:length]])
            mean, mine = tf.unstack(self._decode(model, codes, k))
            mine = self._arrived(unit, mine)
            return where, number * (mean * scale), mine * scale

        positions, found, sent = tf.switch_case(
            phase,
            [
                lambda: (tf.range(size), total, values),
                lambda: (where, tf.reduce_sum(everyone, axis=0), x),
                coded,
            ],
        )
        result = Result(
            SparseEntries(positions, found, size),
            SparseEntries(positions, sent, size),
            entries=tf.size(positions),
        )
        if model is None:
            return result
        units = _divided(everyone, scale)
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
        """Return the phase, a scalar int32; what is too short to code never is."""
        step = tf.cast(step, tf.int64)
        learning = tf.cast(step >= self.dense_steps, tf.int32)
        coded = step >= self.dense_steps + self.learning_steps
        return learning + tf.cast(coded, tf.int32) if self._codes(k) else learning

    def _lead(
        self, values: tf.Tensor, k: int, phase: tf.Tensor, keys: RandomKeys
    ) -> Generator[TensorRequest, tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
        """Return the leader's positions, int32 `[k]`, and largest magnitude."""
        size = values.shape[0]
        offset = tie_offset(size, keys)
        positions, chosen = top_k(values, k, offset)
        scale = to_words(tf.reduce_max(tf.abs(chosen))[tf.newaxis])
        mine = tf.concat([scale, elias_fano.encode(positions, size, k)], axis=0)
        length = mine.shape[0]
        dense = tf.equal(phase, _DENSE)
        gathered = yield AllGather(mine[: tf.where(dense, 0, length)])
        leader = tf.random.stateless_uniform(
            [], keys.shared(1), maxval=gathered.shape[0], dtype=tf.int32
        )
        missing = length - tf.shape(gathered)[1]
        # In the dense phase, when nothing is gathered, its own will do.
        row = tf.where(dense, mine, tf.pad(gathered, [[0, 0], [0, missing]])[leader])
        split = scale.shape[0]
        where, checks = elias_fano.decode(row[tf.newaxis, split:], size, k)
        where = require(checks, where)
        return where[0], from_words(row[:split], values.dtype, [])

    def _codes(self, k: int) -> bool:
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

    def _arrived(self, unit: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
        """Return what of its values a worker sent, given what their code stands for."""
        if not self.keep_loss:
            return unit
        worse = tf.norm(unit - found) >= tf.norm(unit)
        return tf.where(worse, unit, found)

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


def _share(
    x: tf.Tensor, phase: tf.Tensor
) -> Generator[TensorRequest, tf.Tensor, tf.Tensor]:
    """Return the values of all workers, `[N, k]`, in the learning phase; else zeros."""
    words = to_words(x)
    length = words.shape[0]
    gathered = yield AllGather(words[: tf.where(tf.equal(phase, _LEARNING), length, 0)])
    missing = length - tf.shape(gathered)[1]
    num_workers = gathered.shape[0]
    full = tf.ensure_shape(
        tf.pad(gathered, [[0, 0], [0, missing]]), [num_workers, length]
    )
    return from_words(tf.reshape(full, [-1]), x.dtype, [num_workers, x.shape[0]])


def _divided(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Return values in units of the scale; zeros if that is 0."""
    return tf.clip_by_value(tf.math.divide_no_nan(x, scale), -_WIDEST, _WIDEST)
