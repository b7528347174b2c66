"""Top-k of chunks with 2-bit values, as SparseLoCo sends pseudo-gradients."""

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
from tf_dgc.compressors.base import NativeMethod, Sparsifier
from tf_dgc.compressors.common import quantize
from tf_dgc.compressors.common.one_round import sum_decoded
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import tie_offset

_STEPS = 4  # steps of a chunk's scale per octave
# Powers of 2**0.25 as constants: not all processors round computed powers alike.
_ROOTS = np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429])
_EXPONENTS = np.arange(2, 257)
_SHARES = np.append(
    0.0, np.ldexp(_ROOTS[_EXPONENTS % _STEPS], _EXPONENTS // _STEPS - 64)
)
_LARGEST = float(np.finfo(np.float32).max) / 4  # twice that, rounded up, is finite


@keras.saving.register_keras_serializable(package="tf_dgc")
class ChunkedTopK(Sparsifier):
    """Sends each chunk's entries of largest magnitude, as signs and two levels.

    After Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo",
    2025: the 64 entries of largest magnitude of each chunk of 4,096, in 2 bits each,
    with an error feedback that decays (`decay`) and replaces an outer momentum. Chunks
    are consecutive entries of the flat tensor; a shorter one at the end sends the same
    share, rounded up.

    A value is a sign and one of two levels. A chunk has a scale, the mean magnitude of
    its sent entries, in 8 bits, as a power of `2**0.25` relative to the largest scale.
    The two levels, common to the whole tensor, are multiples of the scale: the mean of
    the magnitudes above it, and of those below. Positions take 7.5 bits each
    (`codecs/golomb.py`), in total 9.7 bits per entry of a large tensor, 1/212 of
    float32. Once in many steps the payload has no room for the last few positions,
    counted from a random offset: these entries stay in the residual.

    If a chunk has fewer nonzero entries than it sends, zeros are sent as the smaller
    level, and the residual compensates for it in later steps: weights without a
    gradient fluctuate around their values.

    Args:
        chunk: number of entries of a chunk, 1 or more.
        per_chunk: number of entries of a chunk that are sent, from 1 to `chunk`.
        decay: factor of the residual before it is added to the next input, in (0, 1];
            0.95 in the paper. With 1 nothing is lost.
    """

    name = "chunked_top_k"
    reference = "Sarfi et al., Communication efficient LLM pre-training, 2025"
    error_feedback = "required"
    limits_magnitudes = True

    def __init__(self, chunk: int = 4096, per_chunk: int = 64, decay: float = 1.0):
        self.chunk = arguments.check_whole("chunk", chunk, 1)
        self.per_chunk = arguments.check_whole("per_chunk", per_chunk, 1)
        if self.per_chunk > self.chunk:
            raise ValueError(
                "`per_chunk` must be at most `chunk`, the number of entries there are. "
                f"Received: per_chunk={show(per_chunk)}, chunk={show(chunk)}"
            )
        self.decay = self.feedback_decay = arguments.check_decay(decay)

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of positions, codes and scales."""
        del dtype
        size = math.prod(shape)
        counts = self._counts(size)
        k = sum(counts)
        scales = -(-len(counts) // 4)
        words = golomb.num_words(size, k) + quantize.num_words(k, 2) + scales + 3
        return 4 * words

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Select, encode and gather."""
        del state
        limit = min(keys.max_magnitude, _LARGEST)
        flat = value_types.bound(tf.reshape(values, [-1]), limit)
        size, dtype = flat.shape[0], flat.dtype
        (chunk, _), counts = self._chunk(size), self._counts(size)
        k, offset = sum(counts), tie_offset(size, keys)
        rotated = golomb.rotate(self._select(flat, keys), size, offset)
        position_words, _ = golomb.encode(rotated, size)
        positions = golomb.unrotate(rotated, size, offset)
        value_words = _encode(tf.gather(flat, positions), positions // chunk, counts)
        words = tf.concat([position_words, *value_words], axis=0)
        gathered = yield AllGather(words)
        split = golomb.num_words(size, k)

        def decode(words: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            rotated, _ = golomb.decode(words[:split], size, k)
            is_sent = rotated < size
            positions = golomb.unrotate(rotated, size, offset)
            decoded = _decode(words[split:], positions // chunk, len(counts), dtype)
            decoded = value_types.bound(decoded, keys.max_magnitude)
            decoded = tf.where(is_sent, decoded, tf.zeros_like(decoded))
            return tf.scatter_nd(positions[:, tf.newaxis], decoded, [size]), is_sent

        total = sum_decoded(gathered, lambda w: decode(w)[0], [size], dtype)
        sent, is_sent = decode(words)
        ones = tf.cast(is_sent, tf.int32)
        chosen = tf.scatter_nd(positions[:, tf.newaxis], ones, [size]) > 0
        return Result(total, sent, entries=tf.reduce_sum(ones), chosen=chosen)

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        size = math.prod(shape)
        parameters = [
            *itertools.chain(*map(NativeMethod.in_halves, self._chunk(size))),
            self.decay,
            *golomb.native_parameters(size, sum(self._counts(size))),
        ]
        return NativeMethod(self.name, parameters, bounded=True)

    def _counts(self, size: int) -> list[int]:
        """Return the number of sent entries of each chunk."""
        chunk, each = self._chunk(size)
        whole, rest = divmod(size, chunk)
        return [each] * whole + ([self._num_sent(rest)] if rest else [])

    def _chunk(self, size: int) -> tuple[int, int]:
        """Return the entries of a chunk, and the number of sent entries."""
        chunk = max(1, min(self.chunk, size))
        return chunk, self._num_sent(chunk)

    def _num_sent(self, length: int) -> int:
        """Return the number of sent entries of a chunk of some length."""
        return -(-self.per_chunk * length // self.chunk)

    def _select(self, flat: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return the positions to send, int32 `[k]`, in any order."""
        size = flat.shape[0]
        chunk, _ = self._chunk(size)
        whole = size // chunk * chunk
        positions = []
        for start, end, width in ((0, whole, chunk), (whole, size, size - whole)):
            if start < end:
                rows = tf.abs(tf.reshape(flat[start:end], [-1, width]))
                k = self._num_sent(width)
                # `top_k` takes the first of equals; rolling favors no position.
                shift = tf.cast(keys.tie() * width, tf.int32)
                best = tf.math.top_k(tf.roll(rows, -shift, 1), k, sorted=False).indices
                first = start + width * tf.range(rows.shape[0])[:, tf.newaxis]
                row_positions = first + tf.math.floormod(best + shift, width)
                positions.append(tf.reshape(row_positions, [-1]))
        return tf.concat(positions, axis=0)

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
    """Return the words of scales and codes.

    Args:
        values: values to send, float `[k]`.
        chunks: index of each value's chunk, int32 `[k]`.
        counts: number of values of each chunk.
    """
    magnitudes = tf.cast(tf.abs(values), tf.float64)
    sums = tf.math.unsorted_segment_sum(magnitudes, chunks, len(counts))
    means = sums / tf.constant(counts, tf.float64)
    largest = tf.cast(tf.reduce_max(means), tf.float32)
    ratio = tf.math.divide_no_nan(means, tf.cast(largest, tf.float64))
    octaves = tf.math.log(tf.maximum(ratio, 1e-300)) / math.log(2.0)
    scales = tf.clip_by_value(tf.round(255 + _STEPS * octaves), 0, 255)
    shares = tf.gather(tf.constant(_SHARES, tf.float64), tf.cast(scales, tf.int32))
    units = tf.gather(shares * tf.cast(largest, tf.float64), chunks)
    multiples = tf.math.divide_no_nan(magnitudes, units)
    is_above = multiples >= 1
    codes = tf.cast(values < 0, tf.int32) + 2 * tf.cast(is_above, tf.int32)
    levels = [_masked_mean(multiples, ~is_above), _masked_mean(multiples, is_above)]
    header = tf.bitcast(tf.stack([largest, *levels]), tf.int32)
    return [header, _pack_bytes(scales), quantize.pack(codes, 2)]


def _decode(
    words: tf.Tensor, chunks: tf.Tensor, num_chunks: int, dtype: tf.DType
) -> tf.Tensor:
    """Return the values of one worker's encoded words, `[k]`."""
    header = tf.bitcast(words[:3], tf.float32)
    split = 3 + -(-num_chunks // 4)
    scales = tf.reshape(tf.bitcast(words[3:split], tf.uint8), [-1])
    codes = quantize.unpack(words[split:], 2, chunks.shape[0])
    shares = tf.gather(tf.constant(_SHARES, tf.float64), tf.cast(scales, tf.int32))
    units = tf.gather(tf.cast(header[0], tf.float64) * shares, chunks)
    levels = tf.cast(tf.concat([header[1:], -header[1:]], axis=0), tf.float64)
    order = tf.constant([0, 2, 1, 3])  # a code is `is_negative + 2 * is_above`
    return tf.cast(units * tf.gather(tf.gather(levels, order), codes), dtype)


def _masked_mean(values: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Return the mean of the values in a mask, scalar float32; 0 without any."""
    weights = tf.cast(mask, tf.float64)
    total = tf.reduce_sum(values * weights)
    mean = tf.math.divide_no_nan(total, tf.reduce_sum(weights))
    return tf.cast(mean, tf.float32)


def _pack_bytes(numbers: tf.Tensor) -> tf.Tensor:
    """Return integers below 256 as int32 words."""
    padded = tf.pad(tf.cast(numbers, tf.uint8), [[0, -numbers.shape[0] % 4]])
    return tf.bitcast(tf.reshape(padded, [-1, 4]), tf.int32)
