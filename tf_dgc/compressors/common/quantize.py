"""Stochastic rounding and packed codes, for methods that quantize."""

import tensorflow as tf

from tf_dgc.codecs import bits, value_types

_TRITS = 20  # ternary digits in a word


def rows(values: tf.Tensor, bucket: int) -> tf.Tensor:
    """Return `[n]` as rows, `[ceil(n / bucket), bucket]`, padded with zeros.

    A bucket longer than n is shortened to n, to save memory.
    """
    bucket = max(1, min(bucket, values.shape[0]))
    missing = -values.shape[0] % bucket
    return tf.reshape(tf.pad(values, [[0, missing]]), [-1, bucket])


def norms(values: tf.Tensor) -> tf.Tensor:
    """Return the norm of each row, float `[rows, 1]`, at most the largest number.

    Norms of float32 rows are computed in float64, where squares are exact and do not
    overflow: so the result does not depend on the order of the sum or the processor.
    """
    if values.dtype == tf.float64:  # scaled to 1 first, so that squares do not overflow
        largest = tf.reduce_max(tf.abs(values), axis=1, keepdims=True)
        unit = tf.math.divide_no_nan(values, largest)
        lengths = tf.norm(unit, axis=1, keepdims=True)
        return tf.minimum(largest, values.dtype.max / lengths) * lengths
    squares = tf.square(tf.cast(values, tf.float64))
    lengths = tf.sqrt(tf.reduce_sum(squares, axis=1, keepdims=True))
    return value_types.round_to(lengths, values.dtype)


def stochastic_round(values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Round down or up at random, so that the expected result is the value."""
    down = tf.floor(values)
    chance = tf.random.stateless_uniform(values.shape, seed, dtype=values.dtype)
    return down + tf.cast(chance < values - down, values.dtype)


def num_words(count: int, width: int) -> int:
    """Return the words of `count` codes of `width` bits."""
    return width * bits.num_stream_words(count)


def pack(codes: tf.Tensor, width: int) -> tf.Tensor:
    """Pack codes, int32 `[m]`, into `width` bits each, 1 to 31, plane by plane.

    All lowest bits come first, as one stream, then all second bits, and so on. So any
    width costs exactly that many bits, except for the padding of each plane.
    """
    planes = [
        tf.bitwise.bitwise_and(tf.bitwise.right_shift(codes, bit), 1)
        for bit in range(width)
    ]
    return tf.concat([bits.pack_bits(plane) for plane in planes], axis=0)


def unpack(words: tf.Tensor, width: int, count: int) -> tf.Tensor:
    """Return the codes, int32 `[count]`, that `pack` packed."""
    planes = bits.unpack_bits(tf.reshape(words, [width, -1]))[:, :count]
    weights = tf.constant([[2**bit] for bit in range(width)], tf.int32)
    return tf.reduce_sum(tf.cast(planes, tf.int32) * weights, axis=0)


def pack_trits(trits: tf.Tensor) -> tf.Tensor:
    """Pack ternary digits, int32 `[m]`, 5 per byte (3**5 is 243): 1.6 bits each."""
    padded = tf.pad(trits, [[0, -trits.shape[0] % _TRITS]])
    digits = tf.reshape(padded, [-1, 4, 5])
    in_bytes = tf.reduce_sum(digits * tf.constant([1, 3, 9, 27, 81]), axis=2)
    return tf.bitcast(tf.cast(in_bytes, tf.uint8), tf.int32)


def unpack_trits(words: tf.Tensor, count: int) -> tf.Tensor:
    """Return the digits, int32 `[count]`, that `pack_trits` packed."""
    in_bytes = tf.cast(tf.reshape(tf.bitcast(words, tf.uint8), [-1]), tf.int32)
    digits = in_bytes[:, tf.newaxis] // tf.constant([1, 3, 9, 27, 81]) % 3
    return tf.reshape(digits, [-1])[:count]


def num_trit_words(count: int) -> int:
    """Return the words of `count` ternary digits."""
    return -(-count // _TRITS)
