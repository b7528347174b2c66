"""Golomb codes of the gaps between sorted positions, in a fixed number of words.

For k positions below n, each gap g is stored as `g // b` in unary and `g % b` in radix
b, as many digits per word as fit. So b is one of the few roots of 2**32: the one with
the shortest code for the gaps of random positions (Golomb, "Run-length encodings",
1966). For 64 of 4,096 that is b = 40, six digits per word, and 7.47 bits per position;
the entropy is 7.36, and Elias-Fano takes 8.

The length of the unary parts varies. There is room for its mean and a few deviations;
the last positions that do not fit are dropped. Count positions from an offset drawn in
each step (`rotate`), so that others are dropped each time.
"""

import math

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs.bits import num_stream_words, pack_bits, to_unsigned, unpack_bits

# Digits per word, and the largest radix that allows them; one must fit int32.
_RADIXES = {1: 2**30} | {
    digits: int(2 ** (32 / digits))
    for digits in (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 20, 32)
}
_DEVIATIONS = 2.0  # of the square root of k; the unary parts' own is a third of that


def radix(size: int, k: int) -> tuple[int, int]:
    """Return the digits per word and their radix b."""

    def bits(digits: int) -> float:
        return 32 / digits + _mean_unary(size, k, _RADIXES[digits])

    best = min(_RADIXES, key=bits)
    return best, _RADIXES[best]


def num_words(size: int, k: int) -> int:
    """Return the words of k positions below `size`."""
    digits, b = radix(size, k)
    return -(-k // digits) + num_stream_words(_unary_bits(size, k, b))


def native_parameters(size: int, k: int) -> list[float]:
    """Return the native engine's parameters for k positions below `size`."""
    digits, b = radix(size, k)
    room = _unary_bits(size, k, b)
    return [digits, b, room >> 16, room & 0xFFFF]  # exact as float32


def rotate(positions: tf.Tensor, size: int, offset: tf.Tensor) -> tf.Tensor:
    """Return positions counted cyclically from `offset`, in ascending order."""
    return tf.sort(tf.math.floormod(positions - offset, size))


def unrotate(rotated: tf.Tensor, size: int, offset: tf.Tensor) -> tf.Tensor:
    """Return the original positions; arbitrary for `size`, which stands for none."""
    rest = size - offset  # `rotated + offset` may not fit int32
    return tf.where(rotated < rest, rotated + offset, rotated - rest)


def encode(positions: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Encode positions, ascending int32 `[k]`, k static; return how many fit, too."""
    k = positions.shape[0]
    digits, b = radix(size, k)
    room = _unary_bits(size, k, b)
    gaps = positions - tf.concat([[-1], positions[:-1]], axis=0) - 1
    ones = tf.cumsum(gaps // b + 1) - 1
    fit = tf.math.count_nonzero(ones < room, dtype=tf.int32)
    indices = tf.where(ones < room, ones, room)[:, tf.newaxis]
    unary = tf.scatter_nd(indices, tf.ones_like(positions), [room + k])[:room]
    unary = tf.minimum(unary, 1)
    remainders = tf.pad(gaps % b, [[0, -k % digits]])
    powers = tf.constant([b**i for i in range(digits)], tf.int64)
    rows = tf.reshape(tf.cast(remainders, tf.int64), [-1, digits])
    wide = tf.reduce_sum(rows * powers, axis=1)
    low = tf.bitcast(tf.cast(wide, tf.uint32), tf.int32)
    return tf.concat([low, pack_bits(unary)], axis=0), fit


def decode(words: tf.Tensor, size: int, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Decode the positions of one worker, int32 `[k]`; return how many fit, too.

    Positions that did not fit are `size`.
    """
    digits, b = radix(size, k)
    split = -(-k // digits)
    wide = tf.cast(to_unsigned(words[:split]), tf.int64)
    powers = tf.constant([b**i for i in range(digits)], tf.int64)
    remainders = tf.reshape((wide[:, tf.newaxis] // powers) % b, [-1])[:k]
    bits = unpack_bits(words[tf.newaxis, split:])[0]
    fit = tf.minimum(tf.math.count_nonzero(bits, dtype=tf.int32), k)
    ends = _first_ones(bits, k) + 1
    quotients = ends - tf.concat([[0], ends[:-1]], axis=0) - 1
    steps = tf.where(tf.range(k) < fit, quotients * b + remainders + 1, size)
    positions = tf.minimum(tf.cumsum(steps) - 1, size)
    return tf.cast(positions, tf.int32), fit


def _first_ones(bits: tf.Tensor, k: int) -> tf.Tensor:
    """Return the indices of the first k ones, int64 `[k]`, padded with the length."""
    if tracing.in_xla_context():  # XLA needs static shapes
        indices = tf.range(bits.shape[0], dtype=tf.int64)
        indices = tf.sort(tf.where(bits > 0, indices, bits.shape[0]))[:k]
        padding = [[0, k - indices.shape[0]]]
        return tf.pad(indices, padding, constant_values=bits.shape[0])
    indices = tf.where(bits > 0)[:k, 0]
    padding = [[0, k - tf.size(indices)]]
    padded = tf.pad(indices, padding, constant_values=tf.size(bits, tf.int64))
    return tf.ensure_shape(padded, [k])


def _mean_unary(size: int, k: int, b: int) -> float:
    """Return the mean bits of a unary part for uniformly random positions."""
    skipped = (1 - k / size) ** b
    return 1 / (1 - skipped)


def _unary_bits(size: int, k: int, b: int) -> int:
    """Return the bits reserved for all unary parts, at most what they can take."""
    maximum = k + (size - k) // b
    expected = k * _mean_unary(size, k, b)
    return min(maximum, math.ceil(expected + _DEVIATIONS * math.sqrt(k) + 2))
