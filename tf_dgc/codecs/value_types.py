"""Value types: values as words, and back (wire_format.md).

The sender keeps in its residual what a narrow type loses.
"""

import math
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.codecs import bits
from tf_dgc.codecs.bits import num_stream_words
from tf_dgc.codecs.checks import BufferCheck

CHOICES = ("float32", "bfloat16", "float16", "mxint8", "mxfp4", "sign")
"""Value types for users. Float64 accumulators send "float64" by default."""

UNCOMPRESSED_CHOICES = ("bfloat16", "mxint8")
"""Value types of uncompressed tensors for users; None for the accumulators' type."""

BLOCK_SIZE = 32
"""Entries that share a scale in a block format."""

_OVERFLOW = (
    "What that worker accumulated has overflowed; clip its gradients (`clipnorm` of "
    "the inner optimizer) or lower the learning rate."
)


def check_choice(value_dtype: str | None) -> None:
    """Raise `ValueError` unless it is None or one of `CHOICES`."""
    _check("value_dtype", value_dtype, CHOICES)


def check_uncompressed_choice(uncompressed_dtype: str | None) -> None:
    """Raise `ValueError` unless it is None or one of `UNCOMPRESSED_CHOICES`."""
    _check("uncompressed_dtype", uncompressed_dtype, UNCOMPRESSED_CHOICES)


def is_exact(value_dtype: str, dtype: tf.DType) -> bool:
    """Return whether values of accumulators of `dtype` are sent exactly."""
    return value_dtype in {dtype.name, "float64"}


def is_shared(value_dtype: str | None) -> bool:
    """Return whether the code of a value depends on others that are sent with it."""
    return value_dtype == "sign" or value_dtype in BLOCK_FORMATS


def value_bits(value_dtype: str, k: int | tf.Tensor) -> list[int | tf.Tensor]:
    """Return the bits of each stream of k values; scalar int64 tensors if k is one."""
    k = k if isinstance(k, int) else tf.cast(k, tf.int64)
    if value_dtype == "sign":
        return [32, k]  # the magnitude, which fills a word, and the signs
    if value_dtype in BLOCK_FORMATS:
        return [8 * _num_blocks(k), BLOCK_FORMATS[value_dtype].bits * k]
    return [8 * tf.as_dtype(value_dtype).size * k]


def encode_values(values: tf.Tensor, value_dtype: str) -> tf.Tensor:
    """Encode values, float32 or float64 `[k]`, k at least 1, as int32 `[w]`.

    Rounds to nearest, ties to even. Values beyond the largest finite number of the type
    become that number. NaN stays NaN, which receivers reject.
    """
    if value_dtype == "float64":
        return bits.to_words(tf.cast(values, tf.float64))
    # Always by way of float32: rounding float64 directly could give other bits.
    values = round_to(values, tf.float32)
    if value_dtype == "sign":
        return _encode_signs(values)
    if value_dtype in BLOCK_FORMATS:
        return _encode_blocks(values, BLOCK_FORMATS[value_dtype])
    narrow = round_to(values, tf.as_dtype(value_dtype))
    if narrow.dtype.size == 2:
        narrow = tf.pad(narrow, [[0, tf.math.floormod(tf.size(narrow), 2)]])
        narrow = tf.reshape(narrow, [-1, 2])
    return tf.reshape(tf.bitcast(narrow, tf.int32), [-1])


def decode_values(
    words: tf.Tensor, value_dtype: str, k: int | tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Decode the values of N workers, `[N, k]`, from int32 `[N, w]`."""
    if value_dtype == "sign":
        magnitudes = tf.bitcast(words[:, :1], tf.float32)
        negative = bits.unpack_bits(words[:, 1:])[:, :k] > 0
        return tf.cast(tf.where(negative, -magnitudes, magnitudes), dtype)
    if value_dtype in BLOCK_FORMATS:
        return tf.cast(_decode_blocks(words, BLOCK_FORMATS[value_dtype], k), dtype)
    if value_dtype == "float64":
        words = tf.reshape(words, [words.shape[0], -1, 2])
    values = tf.bitcast(words, tf.as_dtype(value_dtype))  # 16 bits: [N, w, 2]
    return tf.cast(tf.reshape(values, [words.shape[0], -1])[:, :k], dtype)


def value_checks(
    values: tf.Tensor, words: tf.Tensor, value_dtype: str, k: int | tf.Tensor
) -> list[BufferCheck]:
    """Return the checks of decoded values."""
    nonfinite = ~tf.math.is_finite(values)
    count = tf.math.count_nonzero(nonfinite, axis=1, dtype=tf.int32)
    checks = [BufferCheck("values that are not finite", count, 0, _OVERFLOW)]
    if value_dtype == "sign":
        # By the sign bit: whether a denormal is below 0 depends on the processor.
        negative = tf.cast(words[:, 0] < 0, tf.int32)
        checks.append(BufferCheck("negative magnitudes", negative, 0))
    if value_dtype in BLOCK_FORMATS:
        invalid = _num_invalid_scales(words, BLOCK_FORMATS[value_dtype], k)
        checks.append(BufferCheck("scales that are out of range", invalid, 0))
    return checks


def round_to(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Cast to a narrower float type; saturate values beyond its range."""
    if values.dtype == dtype:
        return values
    largest = tf.constant(float(dtype.max), values.dtype)
    is_beyond = tf.abs(values) > largest
    saturated = tf.where(is_beyond, tf.math.sign(values) * largest, values)
    return tf.cast(saturated, dtype)


def largest_contribution(dtype: tf.DType, num_workers: int) -> float:
    """Return a bound of each worker's values so that their sum fits into `dtype`.

    It is a power of two, so that no value type rounds it up.
    """
    exponent = math.frexp(float(dtype.max))[1] - 1
    return math.ldexp(1.0, exponent - (num_workers - 1).bit_length())


def largest_term(dtype: tf.DType, num_workers: int) -> float:
    """Return a bound of each worker's values that are summed in `dtype` itself.

    It is the largest number over a power of two, so that the sum is finite in whatever
    order it is formed and rounded. The power is 32 at least, so that up to 32 workers
    have the same bound.
    """
    return math.ldexp(float(dtype.max), -max(5, (num_workers - 1).bit_length()))


def bound(values: tf.Tensor, largest: float) -> tf.Tensor:
    """Clip magnitudes to `largest`; infinity for no bound."""
    if math.isinf(largest):
        return values
    limit = tf.constant(largest, values.dtype)
    return tf.raw_ops.ClipByValue(t=values, clip_value_min=-limit, clip_value_max=limit)


def _check(name: str, choice: str | None, choices: tuple[str, ...]) -> None:
    if choice is not None and not (isinstance(choice, str) and choice in choices):
        raise ValueError(
            f"`{name}` must be None or one of {', '.join(choices)}. "
            f"Received: {name}={show(choice)}"
        )


def _encode_signs(values: tf.Tensor) -> tf.Tensor:
    # In float64 the sum of float32 numbers is exact unless they differ by a factor of
    # thousands, so its order does not matter.
    mean = tf.reduce_mean(tf.cast(tf.abs(values), tf.float64))
    magnitude = tf.bitcast(tf.cast(mean, tf.float32), tf.int32)
    negative = tf.cast(values < 0, tf.int32)
    return tf.concat([magnitude[tf.newaxis], bits.pack_bits(negative)], axis=0)


# Block formats: 8 or 4 bits per value and a scale per block, MXINT8 and MXFP4 of the
# Open Compute Project's Microscaling specification. Scales are powers of two, so that
# dividing and multiplying by them is exact on every processor.

_NONFINITE_SCALE = 255  # of a block with an entry that is not finite
_LARGEST_INT8 = 127
_FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12)  # in halves
_FP4_TIES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # midpoints between levels


class BlockFormat(NamedTuple):
    """Coding of a block's values."""

    bits: int  # of a value
    exponent_offset: int  # largest value's exponent minus the scale
    min_scale: int  # with a smaller one values would be denormal
    max_scale: int  # of a float32 block
    unit_offset: int  # exponent of the scale minus that of the values' unit


BLOCK_FORMATS = {
    "mxint8": BlockFormat(8, 0, min_scale=8, max_scale=254, unit_offset=6),
    "mxfp4": BlockFormat(4, 2, min_scale=3, max_scale=252, unit_offset=1),
}


def _num_blocks(k: int | tf.Tensor) -> int | tf.Tensor:
    return (k + BLOCK_SIZE - 1) // BLOCK_SIZE


def _encode_blocks(values: tf.Tensor, block_format: BlockFormat) -> tf.Tensor:
    k = tf.size(values)
    padded = tf.pad(values, [[0, tf.math.floormod(-k, BLOCK_SIZE)]])
    rows = tf.reshape(padded, [-1, BLOCK_SIZE])
    scales = _scales(rows, block_format)
    # The inverse of the unit: its exponent is the negative.
    factors = _power_of_two(127 - (scales - block_format.unit_offset))
    is_broken = tf.equal(scales, _NONFINITE_SCALE)
    scaled = tf.where(is_broken, 0.0, rows * factors)
    codes = _to_int8(scaled) if block_format.bits == 8 else _to_fp4(scaled)
    codes = tf.reshape(codes, [-1])[:k]
    words = [_pack(scales[:, 0], 8), _pack(codes, block_format.bits)]
    return tf.concat(words, axis=0)


def _decode_blocks(
    words: tf.Tensor, block_format: BlockFormat, k: int | tf.Tensor
) -> tf.Tensor:
    """Return values, float32 `[N, k]`; NaN in blocks that were not finite."""
    scales, codes = _block_streams(words, block_format, k)
    levels = _from_int8(codes) if block_format.bits == 8 else _from_fp4(codes)
    is_broken = tf.equal(scales, _NONFINITE_SCALE)
    units = _power_of_two(scales - block_format.unit_offset - 127)
    units = tf.where(is_broken, float("nan"), units)
    return tf.cast(levels, tf.float32) * tf.repeat(units, BLOCK_SIZE, axis=1)[:, :k]


def _num_invalid_scales(
    words: tf.Tensor, block_format: BlockFormat, k: int | tf.Tensor
) -> tf.Tensor:
    """Count the scales that no encoder writes, int32 `[N]`."""
    scales, _ = _block_streams(words, block_format, k)
    is_invalid = scales > block_format.max_scale
    is_invalid &= tf.not_equal(scales, _NONFINITE_SCALE)
    is_invalid |= scales < block_format.min_scale
    return tf.math.count_nonzero(is_invalid, axis=1, dtype=tf.int32)


def _scales(rows: tf.Tensor, block_format: BlockFormat) -> tf.Tensor:
    """Return each block's scale, int32 `[b, 1]`, from its largest magnitude's bits."""
    magnitudes = tf.bitwise.bitwise_and(tf.bitcast(rows, tf.int32), 0x7FFFFFFF)
    largest = tf.reduce_max(magnitudes, axis=1, keepdims=True)
    exponents = tf.bitwise.right_shift(largest, 23)
    scales = exponents - block_format.exponent_offset
    scales = tf.maximum(scales, block_format.min_scale)
    return tf.where(tf.equal(exponents, 255), _NONFINITE_SCALE, scales)


def _power_of_two(exponents: tf.Tensor) -> tf.Tensor:
    """Return float32 powers; all must be normal numbers."""
    return tf.bitcast(tf.bitwise.left_shift(exponents + 127, 23), tf.float32)


def _to_int8(scaled: tf.Tensor) -> tf.Tensor:
    rounded = tf.clip_by_value(tf.round(scaled), -_LARGEST_INT8, _LARGEST_INT8)
    return tf.bitwise.bitwise_and(tf.cast(rounded, tf.int32), 0xFF)


def _from_int8(codes: tf.Tensor) -> tf.Tensor:
    return codes - 2 * tf.bitwise.bitwise_and(codes, 0x80)


def _to_fp4(scaled: tf.Tensor) -> tf.Tensor:
    """Round to nearest; ties to the level of an even code."""
    magnitudes = tf.abs(scaled)
    level = tf.zeros_like(scaled, tf.int32)
    for i, tie in enumerate(_FP4_TIES):
        is_above = magnitudes >= tie if i % 2 else magnitudes > tie
        level += tf.cast(is_above, tf.int32)
    negative = (scaled < 0) & (level > 0)
    return level + tf.where(negative, 8, 0)


def _from_fp4(codes: tf.Tensor) -> tf.Tensor:
    levels = tf.gather(tf.constant(_FP4_LEVELS), tf.bitwise.bitwise_and(codes, 7))
    return tf.where(codes >= 8, -levels, levels)


def _block_streams(
    words: tf.Tensor, block_format: BlockFormat, k: int | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return scales, int32 `[N, b]`, and codes, int32 `[N, k]`."""
    blocks = _num_blocks(k)
    split = num_stream_words(8 * blocks)
    scales = _unpack(words[:, :split], 8)[:, :blocks]
    return scales, _unpack(words[:, split:], block_format.bits)[:, :k]


def _pack(codes: tf.Tensor, width: int) -> tf.Tensor:
    """Return the words of a stream of codes, int32 `[k]`, of `width` bits each."""
    lanes = 32 // width
    codes = tf.pad(codes, [[0, tf.math.floormod(-tf.size(codes), lanes)]])
    shifts = tf.range(0, 32, width)
    # Codes of a word do not overlap: their sum is their union.
    shifted = tf.bitwise.left_shift(tf.reshape(codes, [-1, lanes]), shifts)
    return tf.reduce_sum(shifted, axis=1)


def _unpack(words: tf.Tensor, width: int) -> tf.Tensor:
    """Return the codes, int32 `[N, 32 / width * w]`, of N streams, int32 `[N, w]`."""
    shifts = tf.range(0, 32, width)
    shifted = tf.bitwise.right_shift(words[:, :, tf.newaxis], shifts)
    codes = tf.bitwise.bitwise_and(shifted, (1 << width) - 1)  # removes sign bits
    return tf.reshape(codes, [words.shape[0], -1])
