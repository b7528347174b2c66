"""Elias gamma codes of the nonzero entries of an integer vector.

As in QSGD (Alistarh et al., NeurIPS 2017, section 3.1), each nonzero entry is coded by
the distance to the one before, its sign and its magnitude. The gamma code of an integer
c >= 1 is `b = floor(log2 c)` zeros, a one, and the low b bits of c: `2 b + 1` bits
(Elias, "Universal codeword sets and representations of the integers", 1975).

The bits are grouped by kind, so that entries can be decoded in parallel: word 0 is the
number k of entries; one stream has k signs, then the 2 k unary parts of distances and
magnitudes, then their 2 k low parts.
"""

import math

import tensorflow as tf

from tf_dgc.codecs.bits import num_stream_words, to_unsigned, unpack_bits


def max_bits(size: int, total: float) -> float:
    """Return an upper bound of a stream's bits; `total` bounds the sum of magnitudes.

    k entries take at most `3 k + 2 sum of log2(distance) + 2 sum of log2(magnitude)`
    bits. Distances add up to at most n, magnitudes to `total`, and the logarithm is
    concave: so that is at most `3 k + 2 k log2(n total / k^2)`, here for the worst k.
    """
    worst = 2**0.75 / math.e * math.sqrt(size * total)  # where the derivative is 0
    k = min(size, total, worst)
    return 3 * k + 2 * k * math.log2(size * total / k**2) if k else 0.0


def num_words(bits: float) -> int:
    """Return the words of a stream of `bits` bits and of the number of entries."""
    return 1 + num_stream_words(math.ceil(bits))


def encode(levels: tf.Tensor, num_words: int) -> tf.Tensor:
    """Encode int32 `[n]` in `num_words` words; entries that do not fit become 0."""
    positions = tf.where(levels != 0)[:, 0]
    entries = tf.gather(levels, positions)
    previous = tf.concat([[-1], positions[:-1]], axis=0)
    distances = tf.cast(positions - previous, tf.int32)
    bits = 2 * (_log2(distances) + _log2(tf.abs(entries))) + 3
    room = 32 * (num_words - 1)
    k = tf.math.count_nonzero(tf.cumsum(tf.cast(bits, tf.int64)) <= room)
    codes = tf.concat([distances[:k], tf.abs(entries[:k])], axis=0)
    widths = _log2(codes)
    ones = k + tf.cumsum(tf.cast(widths + 1, tf.int64)) - 1
    low = codes - tf.bitwise.left_shift(1, widths)
    start = tf.reduce_max(tf.concat([[-1], ones], axis=0)) + 1
    offsets = start + tf.cumsum(tf.cast(widths, tf.int64), exclusive=True)
    negative = tf.cast(entries[:k] < 0, tf.int32)
    # No two parts share a bit, so their sum is their union. Two additional words take
    # the second halves of the last parts, which are 0.
    bit_offsets = tf.concat([tf.range(k), ones, offsets], axis=0)
    parts = tf.concat([negative, tf.ones_like(codes), low], axis=0)
    shift = tf.cast(bit_offsets % 32, tf.int32)
    first = tf.bitwise.left_shift(parts, shift)
    second = tf.bitwise.right_shift(tf.bitwise.right_shift(parts, 1), 31 - shift)
    words = tf.math.unsorted_segment_sum(
        tf.concat([first, second], axis=0),
        tf.concat([bit_offsets // 32, bit_offsets // 32 + 1], axis=0),
        num_words + 1,
    )
    return tf.concat([[tf.cast(k, tf.int32)], words[: num_words - 1]], axis=0)


def decode(words: tf.Tensor, size: int) -> tf.Tensor:
    """Decode int32 `[size]`; safe for any words."""
    k = tf.cast(tf.clip_by_value(words[0], 0, size), tf.int64)
    bits = unpack_bits(words[tf.newaxis, 1:])[0]
    negative = bits[:k] > 0
    ones = tf.where(bits[k:] > 0)[: 2 * k, 0]
    ones = tf.pad(ones, [[0, 2 * k - tf.size(ones, tf.int64)]])
    before = tf.concat([tf.constant([-1], tf.int64), ones], axis=0)
    widths = tf.clip_by_value(ones - before[:-1] - 1, 0, 30)
    start = k + tf.reduce_max(before) + 1
    low = _read(words[1:], start + tf.cumsum(widths, exclusive=True), widths)
    codes = tf.bitwise.left_shift(1, tf.cast(widths, tf.int32)) + low
    positions = tf.cumsum(tf.cast(codes[:k], tf.int64)) - 1
    positions = tf.clip_by_value(positions, 0, size)
    levels = tf.where(negative, -codes[k:], codes[k:])
    return tf.scatter_nd(positions[:, tf.newaxis], levels, [size + 1])[:size]


def _log2(numbers: tf.Tensor) -> tf.Tensor:
    """Return `floor(log2 c)` of int32 c >= 1, exactly: the exponent of a float64."""
    bits = tf.bitcast(tf.cast(numbers, tf.float64), tf.int64)
    exponents = tf.bitwise.right_shift(bits, tf.constant(52, tf.int64))
    return tf.cast(exponents, tf.int32) - 1023


def _read(words: tf.Tensor, offsets: tf.Tensor, widths: tf.Tensor) -> tf.Tensor:
    """Return `[m]` numbers of `widths` bits each, which begin at bits `offsets`."""
    padded = to_unsigned(tf.pad(words, [[0, 2]]))
    indices = tf.minimum(offsets // 32, words.shape[0])
    shift = tf.cast(offsets % 32, tf.uint32)
    first = tf.bitwise.right_shift(tf.gather(padded, indices), shift)
    one = tf.constant(1, tf.uint32)
    second = tf.bitwise.left_shift(tf.gather(padded, indices + 1), one)
    second = tf.bitwise.left_shift(second, 31 - shift)
    both = tf.bitcast(tf.bitwise.bitwise_or(first, second), tf.int32)
    mask = tf.bitwise.left_shift(1, tf.cast(widths, tf.int32)) - 1
    return tf.bitwise.bitwise_and(both, mask)
