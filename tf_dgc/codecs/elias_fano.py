"""Elias-Fano: k ascending positions below n in about 2 + log2(n / k) bits each.

The low `l = floor(log2(n / k))` bits of each position are stored as they are, the rest,
which grows slowly, in unary (wire_format.md). From Elias, "Efficient storage and
retrieval by content and address of static files", JACM 21 (1974).
"""

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs.bits import num_stream_words, to_unsigned, unpack_bits
from tf_dgc.codecs.checks import BufferCheck


def stream_bits(size: int, k: int | tf.Tensor) -> list[int | tf.Tensor]:
    """Return the bits of the low and the high stream; scalar int64 if k is a tensor."""
    return _stream_bits(size, k, _low_width(size, k))


def encode(positions: tf.Tensor, size: int, k: int | tf.Tensor) -> tf.Tensor:
    """Encode positions, int32 `[k]`, strictly ascending and below `size`, as words."""
    width = _low_width(size, k)
    ranks = tf.range(k)
    low = tf.bitwise.bitwise_and(positions, _mask(width))
    offsets = ranks * width  # fits int32: k * l <= n * l / 2**l <= n / 2
    shift = tf.bitwise.bitwise_and(offsets, 31)
    low_words, high_words = map(num_stream_words, _stream_bits(size, k, width))
    bit = _ranks(size, k) + _wide(tf.bitwise.right_shift(positions, width), size)
    # No two entries share a bit, so the sum of a word's parts is their union. The part
    # of an entry in the next word is 0 unless the entry extends to it.
    words = tf.concat(
        [
            _wide(offsets // 32, size),
            _wide((offsets + width) // 32, size),
            bit // 32 + tf.cast(low_words, bit.dtype),
        ],
        axis=0,
    )
    parts = tf.concat(
        [
            tf.bitwise.left_shift(low, shift),
            tf.bitwise.right_shift(tf.bitwise.right_shift(low, 1), 31 - shift),
            tf.bitwise.left_shift(1, tf.cast(tf.math.floormod(bit, 32), tf.int32)),
        ],
        axis=0,
    )
    return tf.math.unsorted_segment_sum(parts, words, low_words + high_words)


def decode(
    words: tf.Tensor, size: int, k: int | tf.Tensor
) -> tuple[tf.Tensor, list[BufferCheck]]:
    """Decode the positions of N workers from int32 `[N, w]`.

    Positions are int32 `[N, k]` whatever the words are; their checks are returned, too.
    """
    width = _low_width(size, k)
    high = words[:, num_stream_words(_stream_bits(size, k, width)[0]) :]
    high_parts = tf.cast(_set_bits(high, size, k) - _ranks(size, k), tf.int32)
    high_parts = tf.bitwise.left_shift(high_parts, width)
    positions = tf.bitwise.bitwise_or(high_parts, _decode_low(words, k, width))
    return positions, [
        BufferCheck("number of positions", _num_ones(high), k),
        BufferCheck(
            "positions out of order or too high", _num_wrong(positions, size), 0
        ),
    ]


def _low_width(size: int, k: int | tf.Tensor) -> int | tf.Tensor:
    """Return `floor(log2(size / k))`, exactly; an int32 tensor if k is a tensor."""
    if isinstance(k, int):
        return (size // k).bit_length() - 1
    powers = tf.constant([2**i for i in range(1, 31)])
    return tf.reduce_sum(tf.cast(powers <= size // k, tf.int32))


def _stream_bits(
    size: int, k: int | tf.Tensor, width: int | tf.Tensor
) -> list[int | tf.Tensor]:
    if isinstance(k, int):
        return [k * width, k + ((size - 1) >> width)]
    k, width = tf.cast(k, tf.int64), tf.cast(width, tf.int64)
    highest = tf.bitwise.right_shift(tf.constant(size - 1, tf.int64), width)
    return [k * width, k + highest]


def _mask(width: int | tf.Tensor) -> int | tf.Tensor:
    return tf.bitwise.left_shift(1, width) - 1


def _wide(bits: tf.Tensor, size: int) -> tf.Tensor:
    """Cast to a type that holds any bit offset in the high stream, at most 2 n."""
    return tf.cast(bits, tf.int64 if size > 2**30 else tf.int32)


def _ranks(size: int, k: int | tf.Tensor) -> tf.Tensor:
    return _wide(tf.range(k), size)


def _decode_low(
    words: tf.Tensor, k: int | tf.Tensor, width: int | tf.Tensor
) -> tf.Tensor:
    words = to_unsigned(words)
    offsets = tf.range(k) * width
    shift = tf.cast(tf.bitwise.bitwise_and(offsets, 31), tf.uint32)
    one = tf.constant(1, tf.uint32)
    first = tf.bitwise.right_shift(tf.gather(words, offsets // 32, axis=1), shift)
    following = tf.gather(words, (offsets + width) // 32, axis=1)
    second = tf.bitwise.left_shift(tf.bitwise.left_shift(following, one), 31 - shift)
    both = tf.bitcast(tf.bitwise.bitwise_or(first, second), tf.int32)
    return tf.bitwise.bitwise_and(both, _mask(width))


def _set_bits(high: tf.Tensor, size: int, k: int | tf.Tensor) -> tf.Tensor:
    """Return the indices of the set bits of N streams, `[N, k]`."""
    bits = unpack_bits(high)
    if tracing.in_xla_context():
        return _set_bits_in_xla(bits, size, k)
    indices = tf.where(tf.cast(bits, tf.bool))[:, 1]
    # If the number of set bits is not k, the result has the right shape but no meaning;
    # the check of that number rejects it.
    num = high.shape[0] * (k if isinstance(k, int) else tf.cast(k, tf.int64))
    indices = tf.concat([indices, tf.zeros([num], tf.int64)], axis=0)[:num]
    return _wide(tf.reshape(indices, [high.shape[0], k]), size)


def _set_bits_in_xla(bits: tf.Tensor, size: int, k: int) -> tf.Tensor:
    # XLA has no `tf.where` of one argument; elsewhere this is several times slower.
    bits = tf.cast(bits, tf.int32)
    ranks = tf.cumsum(bits, axis=1) - 1
    slots = tf.where((bits > 0) & (ranks < k), ranks, k)
    indices = _wide(tf.range(tf.size(bits[0])), size)
    rows = [tf.math.unsorted_segment_sum(indices, s, k + 1) for s in tf.unstack(slots)]
    return tf.stack(rows)[:, :k]


def _num_ones(words: tf.Tensor) -> tf.Tensor:
    ones = tf.cast(tf.raw_ops.PopulationCount(x=words), tf.int32)
    return tf.reduce_sum(ones, axis=1)


def _num_wrong(positions: tf.Tensor, size: int) -> tf.Tensor:
    """Count positions, `[N, k]`, that do not ascend or are not below `size`."""
    descents = tf.math.count_nonzero(
        positions[:, 1:] <= positions[:, :-1], axis=1, dtype=tf.int32
    )
    return descents + tf.cast(positions[:, -1] >= size, tf.int32)
