"""Top-k of chunks, with values in 2 bits, as SparseLoCo sends how far workers moved."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import arguments
from tf_dgc.arguments import show
from tf_dgc.codecs import golomb, value_types
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import Compressor, NativeMethod
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import sum_decoded
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import tie_offset

_STEPS = 4  # of a chunk's scale in an octave
# Powers of 2**0.25 as numbers, as not all computers round alike what they compute.
_ROOTS = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429])
_AT = np.arange(2, 257)
_SHARES = np.append(0.0, np.ldexp(_ROOTS[_AT % _STEPS], _AT // _STEPS - 64))
_LARGEST = float(np.finfo(np.float32).max) / 4  # twice it, and rounded up, still fits


@keras.saving.register_keras_serializable(package="tf_dgc")
class ChunkedTopK(Compressor):
    """Sends the entries of largest magnitude of every chunk, as signs and two sizes.

    After Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo",
    2025: of each chunk of 4,096 entries of a tensor the 64 of largest magnitude, in 2
    bits each, and an error feedback that forgets (`decay`), which takes the place of an
    outer momentum. Chunks are of the flat tensor; a shorter one at the end sends its
    share, rounded up.

    A value is a sign and one of two sizes. A chunk has a scale, the mean magnitude of
    what it sends, in 8 bits, as a power of `2**0.25` below the largest chunk's. Sizes
    are multiples of it, two for the whole tensor: the means of those above it and of
    those below. Positions take 7.5 bits each by the code of `codecs/golomb.py`, all in
    all 9.7 bits per entry of a large tensor, 1/212 of float32. Once in many steps it
    has no room for the last few positions, counted from one that is drawn anew each
    time: these stay in the residual.

    If fewer entries of a chunk are not 0 than it sends, zeros are sent as the smaller
    size, and the residual takes that back: rows without a gradient move about where
    they are.

    Args:
        chunk: number of entries of a chunk, 1 or more.
        per_chunk: number of entries of a chunk that are sent, from 1 to `chunk`.
        decay: share of what was not sent that is added to what is to be sent next, in
            (0, 1]; the paper's is 0.95. With 1 nothing is lost.
    """

    name = "chunked_top_k"
    kind = "sparsification"
    reference = "Sarfi et al., Communication efficient LLM pre-training, 2025"
    error_feedback = "required"
    respects_largest = True

    def __init__(self, chunk: int = 4096, per_chunk: int = 64, decay: float = 1.0):
        self.chunk = arguments.check_whole("chunk", chunk, 1)
        self.per_chunk = arguments.check_whole("per_chunk", per_chunk, 1)
        if self.per_chunk > self.chunk:
            raise ValueError(
                "`per_chunk` must be at most `chunk`, the number of entries there are. "
                f"Received: per_chunk={show(per_chunk)}, chunk={show(chunk)}"
            )
        self.decay = self.feedback_decay = arguments.check_decay(decay)
        self.conserves = self.decay == 1

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of positions, codes, and scales."""
        del dtype
        size = math.prod(shape)
        counts = self._counts(size)
        k = sum(counts)
        scales = -(-len(counts) // 4)
        words = golomb.num_words(size, k) + quantize.num_words(k, 2) + scales + 3
        return 4 * words

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Choose, code and gather."""
        del state
        bound = min(keys.largest, _LARGEST)
        flat = value_types.bound(tf.reshape(values, [-1]), bound)
        size, dtype = flat.shape[0], flat.dtype
        (chunk, _), counts = self._cut(size), self._counts(size)
        k, offset = sum(counts), tie_offset(size, keys)
        turned = golomb.rotate(self._choose(flat, keys), size, offset)
        where, _ = golomb.encode(turned, size)
        at = golomb.unrotate(turned, size, offset)
        what = _encode(tf.gather(flat, at), at // chunk, counts)
        words = tf.concat([where, *what], axis=0)
        gathered = yield AllGather(words)
        split = golomb.num_words(size, k)

        def decode(words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            turned, _ = golomb.decode(words[:split], size, k)
            there, at = turned < size, golomb.unrotate(turned, size, offset)
            found = _decode(words[split:], at // chunk, len(counts), dtype)
            found = value_types.bound(found, keys.largest)
            kept = tf.where(there, found, tf.zeros_like(found))
            return tf.scatter_nd(at[:, tf.newaxis], kept, [size]), there

        total = sum_decoded(gathered, lambda w: decode(w)[0], [size], dtype)
        sent, there = decode(words)
        number = tf.cast(there, tf.int32)
        chosen = tf.scatter_nd(at[:, tf.newaxis], number, [size]) > 0
        return Result(total, sent, entries=tf.reduce_sum(number), chosen=chosen)

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        size = math.prod(shape)
        parameters = [
            *itertools.chain(*map(NativeMethod.in_halves, self._cut(size))),
            self.decay,
            *golomb.native_parameters(size, sum(self._counts(size))),
        ]
        return NativeMethod(self.name, parameters, bounded=True)

    def _counts(self, size: int) -> list[int]:
        """Return how many entries of each chunk are sent."""
        chunk, each = self._cut(size)
        whole, rest = divmod(size, chunk)
        return [each] * whole + ([self._share(rest)] if rest else [])

    def _cut(self, size: int) -> tuple[int, int]:
        """Return the entries of a chunk, at most all, and how many of them are sent."""
        chunk = max(1, min(self.chunk, size))
        return chunk, self._share(chunk)

    def _share(self, length: int) -> int:
        """Return how many entries of a chunk of this length are sent."""
        return -(-self.per_chunk * length // self.chunk)

    def _choose(self, flat: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return the positions to be sent, int32 `[k]`, in any order."""
        size = flat.shape[0]
        chunk, _ = self._cut(size)
        whole = size // chunk * chunk
        found = []
        for start, end, width in ((0, whole, chunk), (whole, size, size - whole)):
            if start < end:
                rows = tf.abs(tf.reshape(flat[start:end], [-1, width]))
                k = self._share(width)
                # `top_k` takes the first of equal ones: no place is to be favoured.
                turn = tf.cast(keys.tie() * width, tf.int32)
                best = tf.math.top_k(tf.roll(rows, -turn, 1), k, sorted=False).indices
                first = start + width * tf.range(rows.shape[0])[:, tf.newaxis]
                at = first + tf.math.floormod(best + turn, width)
                found.append(tf.reshape(at, [-1]))
        return tf.concat(found, axis=0)

    @property
    def sparsity(self) -> float:
        """Share of entries not sent."""
        return 1.0 - self.per_chunk / self.chunk

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "chunk": self.chunk,
            "per_chunk": self.per_chunk,
            "decay": self.decay,
        }


def _encode(
    values: tf.Tensor, chunks: tf.Tensor, counts: Sequence[int]
) -> list[tf.Tensor]:
    """Return scales and codes of values as words.

    Args:
        values: values to be sent, float `[k]`.
        chunks: number of the chunk that each is of, int32 `[k]`.
        counts: numbers of values of the chunks.
    """
    magnitudes = tf.cast(tf.abs(values), tf.float64)
    sums = tf.math.unsorted_segment_sum(magnitudes, chunks, len(counts))
    means = sums / tf.constant(counts, tf.float64)
    largest = tf.cast(tf.reduce_max(means), tf.float32)
    ratio = tf.math.divide_no_nan(means, tf.cast(largest, tf.float64))
    octaves = tf.math.log(tf.maximum(ratio, 1e-300)) / math.log(2.0)
    scales = tf.clip_by_value(tf.round(255 + _STEPS * octaves), 0, 255)
    shares = tf.gather(tf.constant(_SHARES, tf.float64), tf.cast(scales, tf.int32))
    unit = tf.gather(shares * tf.cast(largest, tf.float64), chunks)
    multiples = tf.math.divide_no_nan(magnitudes, unit)
    above = multiples >= 1
    codes = tf.cast(values < 0, tf.int32) + 2 * tf.cast(above, tf.int32)
    sizes = [_mean_of(multiples, ~above), _mean_of(multiples, above)]
    head = tf.bitcast(tf.stack([largest, *sizes]), tf.int32)
    return [head, _pack_bytes(scales), quantize.pack(codes, 2)]


def _decode(
    words: tf.Tensor, chunks: tf.Tensor, num_chunks: int, dtype: tf.DType
) -> tf.Tensor:
    """Return values of one worker's words, as encoded, `[k]`."""
    head = tf.bitcast(words[:3], tf.float32)
    split = 3 + -(-num_chunks // 4)
    scales = tf.reshape(tf.bitcast(words[3:split], tf.uint8), [-1])
    codes = quantize.unpack(words[split:], 2, chunks.shape[0])
    shares = tf.gather(tf.constant(_SHARES, tf.float64), tf.cast(scales, tf.int32))
    unit = tf.gather(tf.cast(head[0], tf.float64) * shares, chunks)
    sizes = tf.cast(tf.concat([head[1:], -head[1:]], axis=0), tf.float64)
    order = tf.constant([0, 2, 1, 3])  # codes are a sign and, twice, above
    return tf.cast(unit * tf.gather(tf.gather(sizes, order), codes), dtype)


def _mean_of(values: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
    """Return the mean of those that are wanted, scalar float32; 0 of none."""
    weights = tf.cast(wanted, tf.float64)
    total = tf.reduce_sum(values * weights)
    mean = tf.math.divide_no_nan(total, tf.reduce_sum(weights))
    return tf.cast(mean, tf.float32)


def _pack_bytes(numbers: tf.Tensor) -> tf.Tensor:
    """Return whole numbers below 256 as int32 words."""
    padded = tf.pad(tf.cast(numbers, tf.uint8), [[0, -numbers.shape[0] % 4]])
    return tf.bitcast(tf.reshape(padded, [-1, 4]), tf.int32)
