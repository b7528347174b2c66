"""Values to words and back, for every value type (docs/wire_format.md).

What a narrow type loses, the sender keeps in its residual.
"""

import math
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.codecs import bits
from tf_dgc.codecs.bits import num_stream_words
from tf_dgc.codecs.checks import BufferCheck

# --- Values in 8 and 4 bits that share a scale in blocks of 32 (docs/wire_format.md).
#
# Formats of the Open Compute Project's Microscaling specification, MXINT8 and MXFP4. As
# a scale is a power of two, only the rounding loses anything: dividing and multiplying
# by
# it is exact, on every processor.

BLOCK_SIZE = 32
"""Entries of a block."""

_BROKEN = 255  # the scale of a block in which not all is finite
_LARGEST_CODE = 127  # of mxint8
_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12)  # of mxfp4: halves
_TIES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # half way from each to the next


class BlockFormat(NamedTuple):
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


BLOCK_FORMATS = {
    "mxint8": BlockFormat(bits=8, below=0, least=8, most=254, steps=6),
    "mxfp4": BlockFormat(bits=4, below=2, least=3, most=252, steps=1),
}


def num_blocks(k: int | tf.Tensor) -> int | tf.Tensor:
    """Return the blocks of k values, of the type of k."""
    return (k + BLOCK_SIZE - 1) // BLOCK_SIZE


def block_bits(name: str, k: int | tf.Tensor) -> list:
    """Return the bits of the streams of k values: of their scales, and their codes."""
    return [8 * num_blocks(k), BLOCK_FORMATS[name].bits * k]


def encode_blocks(values: tf.Tensor, name: str) -> tf.Tensor:
    """Return the words, int32 `[w]`, of values, float32 `[k]`."""
    form, k = BLOCK_FORMATS[name], tf.size(values)
    rows = tf.reshape(
        tf.pad(values, [[0, tf.math.floormod(-k, BLOCK_SIZE)]]), [-1, BLOCK_SIZE]
    )
    scales = _scales(rows, form)
    # One over the unit: its exponent is the negative.
    factors = _power_of_two(127 - _unit(scales, form))
    wrong = tf.equal(scales, _BROKEN)
    scaled = tf.where(wrong, 0.0, rows * factors)
    codes = _to_int8(scaled) if form.bits == 8 else _to_fp4(scaled)
    codes = tf.reshape(codes, [-1])[:k]
    words = [_pack(scales[:, 0], 8), _pack(codes, form.bits)]
    return tf.concat(words, axis=0)


def decode_blocks(words: tf.Tensor, name: str, k: int | tf.Tensor) -> tf.Tensor:
    """Return the values, float32 `[N, k]`, of all workers' words, int32 `[N, w]`.

    A block that was not finite is NaN.
    """
    form = BLOCK_FORMATS[name]
    scales, codes = _streams(words, form, k)
    levels = _from_int8(codes) if form.bits == 8 else _from_fp4(codes)
    broken = tf.equal(scales, _BROKEN)
    units = tf.where(broken, float("nan"), _power_of_two(_unit(scales, form) - 127))
    return tf.cast(levels, tf.float32) * tf.repeat(units, BLOCK_SIZE, axis=1)[:, :k]


def num_invalid_scales(words: tf.Tensor, name: str, k: int | tf.Tensor) -> tf.Tensor:
    """Count the scales that no encoder makes, int32 `[N]`; 255 is not one of them."""
    form = BLOCK_FORMATS[name]
    scales, _ = _streams(words, form, k)
    impossible = (scales > form.most) & tf.not_equal(scales, _BROKEN)
    impossible |= scales < form.least
    return tf.math.count_nonzero(impossible, axis=1, dtype=tf.int32)


def _scales(rows: tf.Tensor, form: BlockFormat) -> tf.Tensor:
    """Return each block's, int32 `[b, 1]`, by the bits of its largest magnitude."""
    magnitudes = tf.bitwise.bitwise_and(tf.bitcast(rows, tf.int32), 0x7FFFFFFF)
    largest = tf.reduce_max(magnitudes, axis=1, keepdims=True)
    exponents = tf.bitwise.right_shift(largest, 23)
    scales = tf.maximum(exponents - form.below, form.least)
    return tf.where(tf.equal(exponents, 255), _BROKEN, scales)


def _unit(scales: tf.Tensor, form: BlockFormat) -> tf.Tensor:
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
    words: tf.Tensor, form: BlockFormat, k: int | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return scales, int32 `[N, b]`, and codes, int32 `[N, k]`."""
    blocks = num_blocks(k)
    split = num_stream_words(8 * blocks)
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


CHOICES = ("float32", "bfloat16", "float16", "mxint8", "mxfp4", "sign")
"""What a user may choose. "float64" is what float64 accumulators send by default."""

UNCOMPRESSED_CHOICES = ("bfloat16", "mxint8")
"""What a user may choose for exempt tensors; None for the type of the accumulators."""

_OVERFLOW = (
    "What that worker accumulated has overflowed; clip its gradients (`clipnorm` of "
    "the inner optimizer) or lower the learning rate."
)


def check_choice(value_dtype: str | None) -> None:
    """Raise `ValueError` unless a user may ask for it."""
    _check("value_dtype", value_dtype, CHOICES)


def check_uncompressed_choice(uncompressed_dtype: str | None) -> None:
    """Raise `ValueError` unless exempt tensors may be sent so."""
    _check("uncompressed_dtype", uncompressed_dtype, UNCOMPRESSED_CHOICES)


def _check(name: str, chosen: str | None, choices: tuple[str, ...]) -> None:
    if chosen is not None and not (isinstance(chosen, str) and chosen in choices):
        raise ValueError(
            f"`{name}` must be None or one of {', '.join(choices)}. "
            f"Received: {name}={show(chosen)}"
        )


def is_exact(value_dtype: str, dtype: tf.DType) -> bool:
    """Whether decoding gives back what was encoded from accumulators of `dtype`."""
    return value_dtype in {dtype.name, "float64"}


def is_shared(value_dtype: str | None) -> bool:
    """Whether what a value is coded as depends on others that are sent with it."""
    return value_dtype == "sign" or value_dtype in BLOCK_FORMATS


def value_bits(value_dtype: str, k: int | tf.Tensor) -> list:
    """Return the bits of the streams in which k values are sent.

    Args:
        value_dtype: name of a value type, one of `CHOICES`, or "float64".
        k: number of values; an int, or a scalar int32 tensor.

    Returns:
        Ints, or scalar int64 tensors if k is one.
    """
    k = k if isinstance(k, int) else tf.cast(k, tf.int64)
    if value_dtype == "sign":
        return [32, k]  # the magnitude, which fills a word, and the signs
    if value_dtype in BLOCK_FORMATS:
        return block_bits(value_dtype, k)
    return [8 * tf.as_dtype(value_dtype).size * k]


def encode_values(values: tf.Tensor, value_dtype: str) -> tf.Tensor:
    """Code values.

    Rounding is to nearest, ties to even; beyond the largest finite number of the value
    type stands that number. NaN stays NaN, for the receivers to refuse.

    Args:
        values: values to be coded, float32 or float64 `[k]`, k at least 1.
        value_dtype: name of a value type, one of `CHOICES`, or "float64".

    Returns:
        int32 `[w]`, the words of the streams.
    """
    if value_dtype == "float64":
        return _to_words(tf.cast(values, tf.float64))
    # By way of float32 always, so that no implementation rounds once and another twice.
    values = round_to(values, tf.float32)
    if value_dtype == "sign":
        return _encode_sign(values)
    if value_dtype in BLOCK_FORMATS:
        return encode_blocks(values, value_dtype)
    return _to_words(round_to(values, tf.as_dtype(value_dtype)))


def decode_values(
    words: tf.Tensor, value_dtype: str, k: int | tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Decode the values of N workers.

    Args:
        words: words of all workers as encoded, int32 `[N, w]`.
        value_dtype: value type that they were encoded with.
        k: number of values; an int, or a scalar int32 tensor.
        dtype: dtype of the result, float32 or float64.

    Returns:
        `[N, k]`.
    """
    if value_dtype == "sign":
        magnitudes = tf.bitcast(words[:, :1], tf.float32)
        negative = bits.unpack_bits(words[:, 1:])[:, :k] > 0
        return tf.cast(tf.where(negative, -magnitudes, magnitudes), dtype)
    if value_dtype in BLOCK_FORMATS:
        return tf.cast(decode_blocks(words, value_dtype, k), dtype)
    if value_dtype == "float64":
        words = tf.reshape(words, [words.shape[0], -1, 2])
    values = tf.bitcast(words, tf.as_dtype(value_dtype))  # 16 bits: [N, w, 2]
    return tf.cast(tf.reshape(values, [words.shape[0], -1])[:, :k], dtype)


def value_checks(
    values: tf.Tensor, words: tf.Tensor, value_dtype: str, k: int | tf.Tensor
) -> list[BufferCheck]:
    """Return what must hold before decoded values may be used.

    Args:
        values: result of `decode`, float `[N, k]`.
        words: words that they were decoded from, int32 `[N, w]`.
        value_dtype: value type that they were encoded with.
        k: number of values; an int, or a scalar int32 tensor.
    """
    bad = tf.math.count_nonzero(~tf.math.is_finite(values), axis=1, dtype=tf.int32)
    found = [BufferCheck("values that are not finite", bad, 0, _OVERFLOW)]
    if value_dtype == "sign":
        # By its sign bit: whether a denormal is less than 0 depends on the processor.
        negative = tf.cast(words[:, 0] < 0, tf.int32)
        found.append(BufferCheck("negative magnitudes", negative, 0))
    if value_dtype in BLOCK_FORMATS:
        wrong = num_invalid_scales(words, value_dtype, k)
        found.append(BufferCheck("scales that are out of range", wrong, 0))
    return found


def round_to(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Cast to a narrower float type; what is beyond its range becomes its largest."""
    if values.dtype == dtype:
        return values
    largest = tf.constant(float(dtype.max), values.dtype)
    beyond = tf.abs(values) > largest
    clamped = tf.where(beyond, tf.math.sign(values) * largest, values)
    return tf.cast(clamped, dtype)


def largest_contribution(dtype: tf.DType, num_workers: int) -> float:
    """Return what each worker may send of an entry: the sum of all fits into `dtype`.

    It is a power of two, so that no type of values rounds it up.
    """
    exponent = math.frexp(float(dtype.max))[1] - 1
    return math.ldexp(1.0, exponent - (num_workers - 1).bit_length())


def largest_term(dtype: tf.DType, num_workers: int) -> float:
    """Return what each worker may send of an entry that is summed as `dtype`.

    It is the largest number over a power of two, which as many workers may send and
    have a finite sum, in whatever order it is formed and rounded. That is one of 32
    workers at least, so that fewer of them all send the same.
    """
    return math.ldexp(float(dtype.max), -max(5, (num_workers - 1).bit_length()))


def bound(values: tf.Tensor, largest: float) -> tf.Tensor:
    """Return values whose magnitude is at most `largest`; infinity for no bound."""
    if math.isinf(largest):
        return values
    bound = tf.constant(largest, values.dtype)
    return tf.raw_ops.ClipByValue(t=values, clip_value_min=-bound, clip_value_max=bound)


def _to_words(values: tf.Tensor) -> tf.Tensor:
    if values.dtype.size == 2:
        values = tf.pad(values, [[0, tf.math.floormod(tf.size(values), 2)]])
        values = tf.reshape(values, [-1, 2])
    return tf.reshape(tf.bitcast(values, tf.int32), [-1])


def _encode_sign(values: tf.Tensor) -> tf.Tensor:
    # In float64, where the sum of float32 numbers is exact unless they differ by a
    # factor of thousands: so its order does not matter.
    mean = tf.reduce_mean(tf.cast(tf.abs(values), tf.float64))
    magnitude = tf.bitcast(tf.cast(mean, tf.float32), tf.int32)
    negative = tf.cast(values < 0, tf.int32)
    return tf.concat([magnitude[tf.newaxis], bits.pack_bits(negative)], axis=0)
