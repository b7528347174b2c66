"""Golomb codes of the gaps between sorted positions, in a number of words known before.

Of k positions below n, each gap g is `g // b` in unary and `g % b` in radix b, as many
digits to a word as fit: so b is one of the few roots of 2**32, the one with the
shortest code of gaps as random positions have them (Golomb, "Run-length encodings",
1966). For 64 of 4,096 that is b = 40, six to a word, and 7.47 bits per position, of
which 7.36 are their entropy; Elias-Fano takes 8. The unary parts' lengths differ, and
there is room for their mean and a few deviations: positions behind are left out. Who
codes positions from a place drawn in each step leaves out others each time.
"""

import math

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs.bits import num_stream_words, pack_bits, to_unsigned, unpack_bits

# Digits of a word, and the largest radix of which so many fit; one must fit int32.
_RADIXES = {1: 2**30} | {
    digits: int(2 ** (32 / digits))
    for digits in (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 20, 32)
}
_DEVIATIONS = 2.0  # of the square root of k; the unary parts' own is a third of that


def radix(size: int, k: int) -> tuple[int, int]:
    """Return how many digits a word has, and their radix b."""

    def bits(digits: int) -> float:
        return 32 / digits + _mean_unary(size, k, _RADIXES[digits])

    best = min(_RADIXES, key=bits)
    return best, _RADIXES[best]


def num_words(size: int, k: int) -> int:
    """Return the words of k positions below `size`."""
    digits, b = radix(size, k)
    return -(-k // digits) + num_stream_words(_unary_bits(size, k, b))


def native_parameters(size: int, k: int) -> list[float]:
    """Return what the native code of k positions below `size` takes."""
    digits, b = radix(size, k)
    room = _unary_bits(size, k, b)
    return [digits, b, room >> 16, room & 0xFFFF]  # exact as float32


def turn(positions: tf.Tensor, size: int, offset: tf.Tensor) -> tf.Tensor:
    """Return distinct positions as counted cyclically from `offset`, ascending."""
    return tf.sort(tf.math.floormod(positions - offset, size))


def turn_back(turned: tf.Tensor, size: int, offset: tf.Tensor) -> tf.Tensor:
    """Return the positions of what was counted from `offset`; of `size` any one."""
    rest = size - offset  # a sum may not fit int32
    return tf.where(turned < rest, turned + offset, turned - rest)


def encode(positions: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Code positions as words.

    Args:
        positions: positions below `size`, int32 `[k]`, strictly ascending, k known.
        size: bound of the positions, n.

    Returns:
        int32 `[num_words(size, k)]`, and how many of the first positions there was room
        for, scalar int32.
    """
    k = positions.shape[0]
    digits, b = radix(size, k)
    room = _unary_bits(size, k, b)
    gaps = positions - tf.concat([[-1], positions[:-1]], axis=0) - 1
    ones = tf.cumsum(gaps // b + 1) - 1
    fit = tf.math.count_nonzero(ones < room, dtype=tf.int32)
    at = tf.where(ones < room, ones, room)[:, tf.newaxis]
    unary = tf.scatter_nd(at, tf.ones_like(positions), [room + k])[:room]
    unary = tf.minimum(unary, 1)
    rests = tf.pad(gaps % b, [[0, -k % digits]])
    powers = tf.constant([b**i for i in range(digits)], tf.int64)
    rows = tf.reshape(tf.cast(rests, tf.int64), [-1, digits])
    wide = tf.reduce_sum(rows * powers, axis=1)
    low = tf.bitcast(tf.cast(wide, tf.uint32), tf.int32)
    return tf.concat([low, pack_bits(unary)], axis=0), fit


def decode(words: tf.Tensor, size: int, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Decode positions of one worker's words.

    Args:
        words: words as encoded, int32 `[num_words(size, k)]`.
        size: bound of the positions, n.
        k: number of positions that were coded.

    Returns:
        Positions, int32 `[k]`, in [0, size) or, where there was no room, `size`; and
        for how many there was, scalar int32.
    """
    digits, b = radix(size, k)
    split = -(-k // digits)
    wide = tf.cast(to_unsigned(words[:split]), tf.int64)
    powers = tf.constant([b**i for i in range(digits)], tf.int64)
    rests = tf.reshape((wide[:, tf.newaxis] // powers) % b, [-1])[:k]
    bits = unpack_bits(words[tf.newaxis, split:])[0]
    found = tf.minimum(tf.math.count_nonzero(bits, dtype=tf.int32), k)
    ends = _ones(bits, k) + 1
    quotients = ends - tf.concat([[0], ends[:-1]], axis=0) - 1
    there = tf.range(k) < found
    steps = tf.where(there, quotients * b + rests + 1, size)
    positions = tf.minimum(tf.cumsum(steps) - 1, size)
    return tf.cast(positions, tf.int32), found


def _ones(bits: tf.Tensor, k: int) -> tf.Tensor:
    """Return where the first k bits are that are 1, int64 `[k]`, the end for others."""
    if tracing.in_xla_context():  # which compiles no search, as its length would vary
        at = tf.range(bits.shape[0], dtype=tf.int64)
        at = tf.sort(tf.where(bits > 0, at, bits.shape[0]))[:k]
        return tf.pad(at, [[0, k - at.shape[0]]], constant_values=bits.shape[0])
    at = tf.where(bits > 0)[:k, 0]
    missing = [[0, k - tf.size(at)]]
    padded = tf.pad(at, missing, constant_values=tf.size(bits, tf.int64))
    return tf.ensure_shape(padded, [k])


def _mean_unary(size: int, k: int, b: int) -> float:
    """Return the mean bits of a unary part, if each place is as likely as any other."""
    skipped = (1 - k / size) ** b
    return 1 / (1 - skipped)


def _unary_bits(size: int, k: int, b: int) -> int:
    """Return the room for all unary parts: never more than any positions take."""
    most = k + (size - k) // b
    expected = k * _mean_unary(size, k, b)
    return min(most, math.ceil(expected + _DEVIATIONS * math.sqrt(k) + 2))
