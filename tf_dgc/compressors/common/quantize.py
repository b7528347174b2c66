"""What methods that quantize have in common: rounding by chance, and packed codes."""

import tensorflow as tf

from tf_dgc.codecs import bits, value_types

_TRITS = 20  # ternary digits in a word


def rows(values: tf.Tensor, bucket: int) -> tf.Tensor:
    """Return `[ceil(n / bucket), bucket]` of `[n]`, filled up with zeros.

    A bucket is at most as long as there are values, so that memory does not grow with
    what it could hold.
    """
    bucket = max(1, min(bucket, values.shape[0]))
    missing = -values.shape[0] % bucket
    return tf.reshape(tf.pad(values, [[0, missing]]), [-1, bucket])


def norms(values: tf.Tensor) -> tf.Tensor:
    """Return the norm of each row, float `[rows, 1]`, the largest number if larger.

    Of float32 numbers in float64, in which their squares are exact and do not overflow:
    so neither the order of the sum nor the processor matters.

    Args:
        values: rows, float32 or float64 `[rows, n]`.
    """
    if values.dtype == tf.float64:  # which is scaled to 1 first
        largest = tf.reduce_max(tf.abs(values), axis=1, keepdims=True)
        unit = tf.math.divide_no_nan(values, largest)
        lengths = tf.norm(unit, axis=1, keepdims=True)
        return tf.minimum(largest, values.dtype.max / lengths) * lengths
    squares = tf.square(tf.cast(values, tf.float64))
    lengths = tf.sqrt(tf.reduce_sum(squares, axis=1, keepdims=True))
    return value_types.round_to(lengths, values.dtype)


def stochastic_round(values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Round down or up so that the expectation is the value.

    Args:
        values: numbers to be rounded, float, of any shape.
        seed: seed of a `Draw`, int32 `[2]`.

    Returns:
        Whole numbers of the same shape and dtype.
    """
    down = tf.floor(values)
    chance = tf.random.stateless_uniform(values.shape, seed, dtype=values.dtype)
    return down + tf.cast(chance < values - down, values.dtype)


def num_words(count: int, width: int) -> int:
    """Return the words that `count` codes of `width` bits take."""
    return width * bits.num_stream_words(count)


def pack(codes: tf.Tensor, width: int) -> tf.Tensor:
    """Pack codes into `width` bits each, plane after plane.

    All lowest bits come first, as one stream, then all second bits, and so on: any
    width costs exactly that many bits, but for what is left of each plane's last word.

    Args:
        codes: codes to be packed, int32 `[m]`, each in [0, 2**width).
        width: bits of a code, 1 to 31.

    Returns:
        int32 `[num_words(m, width)]`.
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
    """Pack ternary digits, 5 in a byte, as 3**5 is 243: 1.6 bits each.

    Args:
        trits: digits, int32 `[m]`, each 0, 1 or 2.

    Returns:
        int32 `[num_trit_words(m)]`.
    """
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
    """Return the words that `count` ternary digits take."""
    return -(-count // _TRITS)
