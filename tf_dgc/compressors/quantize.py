"""What methods that quantize have in common: rounding by chance, and packed codes."""

import tensorflow as tf

from tf_dgc import bitstream


def stochastic_round(values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Round down or up so that the expectation is the value.

    Args:
        values: float, of any shape.
        seed: int32 `[2]`, of a `Draw`.

    Returns:
        Whole numbers of the same shape and dtype.
    """
    down = tf.floor(values)
    chance = tf.random.stateless_uniform(values.shape, seed, dtype=values.dtype)
    return down + tf.cast(chance < values - down, values.dtype)


def num_words(count: int, width: int) -> int:
    """Return the words that `count` codes of `width` bits take."""
    return width * bitstream.num_words(count)


def pack(codes: tf.Tensor, width: int) -> tf.Tensor:
    """Pack codes into `width` bits each, plane after plane.

    All lowest bits come first, as one stream, then all second bits, and so on: any
    width costs exactly that many bits, but for what is left of each plane's last word.

    Args:
        codes: int32 `[m]`, each in [0, 2**width).
        width: 1 to 31.

    Returns:
        int32 `[num_words(m, width)]`.
    """
    planes = [
        tf.bitwise.bitwise_and(tf.bitwise.right_shift(codes, bit), 1)
        for bit in range(width)
    ]
    return tf.concat([bitstream.pack(plane) for plane in planes], axis=0)


def unpack(words: tf.Tensor, width: int, count: int) -> tf.Tensor:
    """Return the codes, int32 `[count]`, that `pack` packed."""
    planes = bitstream.unpack(tf.reshape(words, [width, -1]))[:, :count]
    weights = tf.constant([[2**bit] for bit in range(width)], tf.int32)
    return tf.reduce_sum(tf.cast(planes, tf.int32) * weights, axis=0)
