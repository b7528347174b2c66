"""Values in 8 and 4 bits that share a scale in blocks of 32 (docs/wire_format.md).

Formats of the Open Compute Project's Microscaling specification, MXINT8 and MXFP4. As
a scale is a power of two, only the rounding loses anything: dividing and multiplying by
it is exact, on every processor.
"""

from typing import NamedTuple

import tensorflow as tf

from tf_dgc.codecs import bitstream

SIZE = 32
"""Entries of a block."""

_BROKEN = 255  # the scale of a block in which not all is finite
_LARGEST_CODE = 127  # of mxint8
_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12)  # of mxfp4: halves
_TIES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # half way from each to the next


class Format(NamedTuple):
    """How values of a block are coded.

    Attributes:
        bits: number of bits of a value.
        below: difference of the largest value's exponent and the scale.
        least: smallest scale; a smaller one's values would be denormal numbers.
        most: largest scale of a float32.
        steps: number of powers of two from the unit up to the scale.
    """

    bits: int
    below: int
    least: int
    most: int
    steps: int


FORMATS = {
    "mxint8": Format(bits=8, below=0, least=8, most=254, steps=6),
    "mxfp4": Format(bits=4, below=2, least=3, most=252, steps=1),
}


def num_blocks(k: int | tf.Tensor) -> int | tf.Tensor:
    """Return the blocks of k values, of the type of k."""
    return (k + SIZE - 1) // SIZE


def stream_bits(name: str, k: int | tf.Tensor) -> list:
    """Return the bits of the streams of k values: of their scales, and their codes."""
    return [8 * num_blocks(k), FORMATS[name].bits * k]


def encode(values: tf.Tensor, name: str) -> tf.Tensor:
    """Return the words, int32 `[w]`, of values, float32 `[k]`."""
    form, k = FORMATS[name], tf.size(values)
    rows = tf.reshape(tf.pad(values, [[0, tf.math.floormod(-k, SIZE)]]), [-1, SIZE])
    scales = _scales(rows, form)
    # One over the unit: its exponent is the negative.
    factors = _power_of_two(127 - _unit(scales, form))
    wrong = tf.equal(scales, _BROKEN)
    scaled = tf.where(wrong, 0.0, rows * factors)
    codes = _to_int8(scaled) if form.bits == 8 else _to_fp4(scaled)
    codes = tf.reshape(codes, [-1])[:k]
    words = [_pack(scales[:, 0], 8), _pack(codes, form.bits)]
    return tf.concat(words, axis=0)


def decode(words: tf.Tensor, name: str, k: int | tf.Tensor) -> tf.Tensor:
    """Return the values, float32 `[N, k]`, of all workers' words, int32 `[N, w]`.

    A block that was not finite is NaN.
    """
    form = FORMATS[name]
    scales, codes = _streams(words, form, k)
    levels = _from_int8(codes) if form.bits == 8 else _from_fp4(codes)
    broken = tf.equal(scales, _BROKEN)
    units = tf.where(broken, float("nan"), _power_of_two(_unit(scales, form) - 127))
    return tf.cast(levels, tf.float32) * tf.repeat(units, SIZE, axis=1)[:, :k]


def num_wrong_scales(words: tf.Tensor, name: str, k: int | tf.Tensor) -> tf.Tensor:
    """Count the scales that no encoder makes, int32 `[N]`; 255 is not one of them."""
    form = FORMATS[name]
    scales, _ = _streams(words, form, k)
    impossible = (scales > form.most) & tf.not_equal(scales, _BROKEN)
    impossible |= scales < form.least
    return tf.math.count_nonzero(impossible, axis=1, dtype=tf.int32)


def _scales(rows: tf.Tensor, form: Format) -> tf.Tensor:
    """Return each block's, int32 `[b, 1]`, by the bits of its largest magnitude."""
    magnitudes = tf.bitwise.bitwise_and(tf.bitcast(rows, tf.int32), 0x7FFFFFFF)
    largest = tf.reduce_max(magnitudes, axis=1, keepdims=True)
    exponents = tf.bitwise.right_shift(largest, 23)
    scales = tf.maximum(exponents - form.below, form.least)
    return tf.where(tf.equal(exponents, 255), _BROKEN, scales)


def _unit(scales: tf.Tensor, form: Format) -> tf.Tensor:
    """Return the biased exponent of what values of a block are multiples of."""
    return scales - form.steps


def _power_of_two(exponents: tf.Tensor) -> tf.Tensor:
    """Return float32 of these exponents, all within the range of normal numbers."""
    return tf.bitcast(tf.bitwise.left_shift(exponents + 127, 23), tf.float32)


def _to_int8(scaled: tf.Tensor) -> tf.Tensor:
    rounded = tf.clip_by_value(tf.round(scaled), -_LARGEST_CODE, _LARGEST_CODE)
    return tf.bitwise.bitwise_and(tf.cast(rounded, tf.int32), 0xFF)


def _from_int8(codes: tf.Tensor) -> tf.Tensor:
    return codes - 2 * tf.bitwise.bitwise_and(codes, 0x80)


def _to_fp4(scaled: tf.Tensor) -> tf.Tensor:
    """Round to nearest, and a tie to the level of an even code."""
    magnitudes = tf.abs(scaled)
    level = tf.zeros_like(scaled, tf.int32)
    for i, tie in enumerate(_TIES):
        beyond = magnitudes >= tie if i % 2 else magnitudes > tie
        level += tf.cast(beyond, tf.int32)
    negative = (scaled < 0) & (level > 0)
    return level + tf.where(negative, 8, 0)


def _from_fp4(codes: tf.Tensor) -> tf.Tensor:
    levels = tf.gather(tf.constant(_LEVELS), tf.bitwise.bitwise_and(codes, 7))
    return tf.where(codes >= 8, -levels, levels)


def _streams(
    words: tf.Tensor, form: Format, k: int | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return scales, int32 `[N, b]`, and codes, int32 `[N, k]`."""
    blocks = num_blocks(k)
    split = bitstream.num_words(8 * blocks)
    scales = _unpack(words[:, :split], 8)[:, :blocks]
    return scales, _unpack(words[:, split:], form.bits)[:, :k]


def _pack(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """Return the words of a stream of codes, int32 `[k]`, of so many bits each."""
    lanes = 32 // bits
    codes = tf.pad(codes, [[0, tf.math.floormod(-tf.size(codes), lanes)]])
    shifts = tf.range(0, 32, bits)
    # Bits of a word that do not overlap: their sum is their union.
    moved = tf.bitwise.left_shift(tf.reshape(codes, [-1, lanes]), shifts)
    return tf.reduce_sum(moved, axis=1)


def _unpack(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Return the codes, int32 `[N, 32 / bits * w]`, of N streams, int32 `[N, w]`."""
    shifts = tf.range(0, 32, bits)
    moved = tf.bitwise.right_shift(words[:, :, tf.newaxis], shifts)
    # Without what is shifted in.
    codes = tf.bitwise.bitwise_and(moved, (1 << bits) - 1)
    return tf.reshape(codes, [words.shape[0], -1])
