"""Values to words and back, for every value type (docs/wire_format.md).

What a narrow type loses, the sender keeps in its residual.
"""

import math

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.codecs import bitstream, blocks
from tf_dgc.codecs.checks import Check

CHOICES = ("float32", "bfloat16", "float16", "mxint8", "mxfp4", "sign")
"""What a user may choose. "float64" is what float64 accumulators send by default."""

EXEMPT_CHOICES = ("bfloat16", "mxint8")
"""What a user may choose for exempt tensors; None for the type of the accumulators."""

_OVERFLOW = (
    "What that worker accumulated has overflowed; clip its gradients (`clipnorm` of "
    "the inner optimizer) or lower the learning rate."
)


def check_choice(value_dtype: str | None) -> None:
    """Raise `ValueError` unless a user may ask for it."""
    _check("value_dtype", value_dtype, CHOICES)


def check_exempt_choice(exempt_dtype: str | None) -> None:
    """Raise `ValueError` unless exempt tensors may be sent so."""
    _check("exempt_dtype", exempt_dtype, EXEMPT_CHOICES)


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
    return value_dtype == "sign" or value_dtype in blocks.FORMATS


def stream_bits(value_dtype: str, k: int | tf.Tensor) -> list:
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
    if value_dtype in blocks.FORMATS:
        return blocks.stream_bits(value_dtype, k)
    return [8 * tf.as_dtype(value_dtype).size * k]


def encode(values: tf.Tensor, value_dtype: str) -> tf.Tensor:
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
    values = narrow(values, tf.float32)
    if value_dtype == "sign":
        return _encode_sign(values)
    if value_dtype in blocks.FORMATS:
        return blocks.encode(values, value_dtype)
    return _to_words(narrow(values, tf.as_dtype(value_dtype)))


def decode(
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
        negative = bitstream.unpack(words[:, 1:])[:, :k] > 0
        return tf.cast(tf.where(negative, -magnitudes, magnitudes), dtype)
    if value_dtype in blocks.FORMATS:
        return tf.cast(blocks.decode(words, value_dtype, k), dtype)
    if value_dtype == "float64":
        words = tf.reshape(words, [words.shape[0], -1, 2])
    values = tf.bitcast(words, tf.as_dtype(value_dtype))  # 16 bits: [N, w, 2]
    return tf.cast(tf.reshape(values, [words.shape[0], -1])[:, :k], dtype)


def checks(
    values: tf.Tensor, words: tf.Tensor, value_dtype: str, k: int | tf.Tensor
) -> list[Check]:
    """Return what must hold before decoded values may be used.

    Args:
        values: result of `decode`, float `[N, k]`.
        words: words that they were decoded from, int32 `[N, w]`.
        value_dtype: value type that they were encoded with.
        k: number of values; an int, or a scalar int32 tensor.
    """
    bad = tf.math.count_nonzero(~tf.math.is_finite(values), axis=1, dtype=tf.int32)
    found = [Check("values that are not finite", bad, 0, _OVERFLOW)]
    if value_dtype == "sign":
        # By its sign bit: whether a denormal is less than 0 depends on the processor.
        negative = tf.cast(words[:, 0] < 0, tf.int32)
        found.append(Check("negative magnitudes", negative, 0))
    if value_dtype in blocks.FORMATS:
        wrong = blocks.num_wrong_scales(words, value_dtype, k)
        found.append(Check("scales that are out of range", wrong, 0))
    return found


def narrow(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Cast to a narrower float type; what is beyond its range becomes its largest."""
    if values.dtype == dtype:
        return values
    largest = tf.constant(float(dtype.max), values.dtype)
    beyond = tf.abs(values) > largest
    clamped = tf.where(beyond, tf.math.sign(values) * largest, values)
    return tf.cast(clamped, dtype)


def largest_share(dtype: tf.DType, num_workers: int) -> float:
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


def at_most(values: tf.Tensor, largest: float) -> tf.Tensor:
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
    return tf.concat([magnitude[tf.newaxis], bitstream.pack(negative)], axis=0)
