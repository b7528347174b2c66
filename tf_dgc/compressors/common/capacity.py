"""What methods have in common whose number of entries varies.

Their payload has a stated capacity. Free places are taken by positions beyond the
tensor, so the number of positions below n is the count of entries: it costs no word of
its own, and every payload of a tensor has the same size. If more entries qualify than
fit, those with the highest scores go, and the others stay in the residual.
"""

import tensorflow as tf

from tf_dgc import arguments
from tf_dgc._internals import tracing
from tf_dgc.arguments import show
from tf_dgc.codecs import bits, value_types
from tf_dgc.collectives.requests import (
    Aggregation,
    Result,
    position_mask,
    to_dense_tensor,
)
from tf_dgc.compressors.base import RandomKeys
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.largest import top_k
from tf_dgc.compressors.topk import num_sent, tie_offset


def check_share(what: str, share: float) -> float:
    """Return a share of entries as a float.

    Raises:
        ValueError: unless it is in (0, 1].
    """
    return arguments.check_number(what, share, "(0, 1]", ", a share of the entries")


def check_value_dtype(value_dtype: str | None) -> None:
    """Raise `ValueError` unless values can be sent so beside free places."""
    value_types.check_choice(value_dtype)
    if value_dtype == "sign":
        raise ValueError(
            "The mean magnitude that `value_dtype='sign'` sends is of a fixed number "
            "of entries, which this method does not have. Choose None, 'float32', "
            "'bfloat16', 'float16', 'mxint8' or 'mxfp4'. "
            f"Received: value_dtype={show(value_dtype)}"
        )


def capacity_of(size: int, share: float) -> int:
    """Return `max(1, ceil(share * size))`."""
    return num_sent(size, 1 - share)


def num_words(size: int, capacity: int, value_dtype: str) -> int:
    """Return the words of a payload; see `sparse.num_words`.

    Raises:
        ValueError: if positions, of free places too, do not fit into int32.
    """
    _check_places(size, capacity)
    return sparse.num_words(size + capacity, capacity, value_dtype)


def position_words(size: int, capacity: int) -> int:
    """Return the words of positions alone; raises as `num_words`."""
    _check_places(size, capacity)
    return sparse.position_words(size + capacity, capacity)


def _check_places(size: int, capacity: int) -> None:
    if size + capacity > tf.int32.max:
        raise ValueError(
            "Free places of a payload are positions beyond the tensor, and positions "
            f"are int32: a tensor of {size} entries has room for "
            f"{tf.int32.max - size} places. Choose a smaller capacity. "
            f"Received: {capacity} places"
        )


def choose(
    scores: tf.Tensor, wanted: tf.Tensor, capacity: int, keys: RandomKeys
) -> tf.Tensor:
    """Return positions of wanted entries: all that fit, else the highest scores.

    Among equal scores those that come first in cyclic order from a drawn offset are
    taken, so no position is favoured.

    Args:
        scores: rank of each entry, float `[n]`, above 0 where `wanted`.
        wanted: marks of the entries to choose from, bool `[n]`.
        capacity: number of places, 1 <= capacity <= n.
        keys: seeds for this tensor in this step.

    Returns:
        int32 `[capacity]`, strictly ascending; n or more in free places.
    """
    size = scores.shape[0]
    offset = tie_offset(size, keys)

    def all_of_them() -> tf.Tensor:
        found = tf.cast(tf.where(wanted)[:, 0], tf.int32)
        free = size + tf.range(capacity - tf.size(found))
        return tf.concat([found, free], axis=0)

    def the_best() -> tf.Tensor:
        best, _ = top_k(tf.where(wanted, scores, 0), capacity, offset)
        free = size + tf.range(capacity)
        return tf.sort(tf.where(tf.gather(wanted, best), best, free))

    if tracing.in_xla_context():  # which has no `tf.where` of one argument
        return the_best()
    fits = tf.math.count_nonzero(wanted) <= capacity
    return tf.ensure_shape(tf.cond(fits, all_of_them, the_best), [capacity])


def exchange(values: tf.Tensor, positions: tf.Tensor, value_dtype: str) -> Aggregation:
    """Gather entries as they are, and sum them.

    Args:
        values: gradient, float `[n]`.
        positions: result of `choose`, int32 `[capacity]`.
        value_dtype: type of the values on the wire.
    """
    size, capacity = values.shape[0], positions.shape[0]
    padded = tf.pad(values, [[0, capacity]])
    result = yield from sparse.exchange(padded, positions, capacity, value_dtype)
    return _cut(result, positions, size)


def exchange_signs(
    values: tf.Tensor, positions: tf.Tensor, magnitude: tf.Tensor
) -> Aggregation:
    """Gather the signs of entries, which all have one magnitude.

    Args:
        values: gradient, float `[n]`.
        positions: result of `choose`, int32 `[capacity]`.
        magnitude: magnitude of all of them, scalar, 0 or more; it is sent as float32.
    """
    negative = tf.cast(values_at(values, positions) < 0, tf.int32)
    word = tf.bitcast(value_types.round_to(magnitude, tf.float32), tf.int32)
    coded = tf.concat([word[tf.newaxis], bits.pack_bits(negative)], axis=0)
    decode = sparse.decoder("sign", positions.shape[0], values.dtype)
    return (yield from exchange_coded(positions, values.shape[0], coded, decode))


def exchange_coded(
    positions: tf.Tensor, size: int, coded: tf.Tensor, decode: sparse.Decode
) -> Aggregation:
    """Gather entries whose values a method has coded itself, and sum them.

    Args:
        positions: result of `choose`, int32 `[capacity]`.
        size: number of entries n.
        coded: one value for every place, as words.
        decode: function that decodes `coded`.
    """
    capacity = positions.shape[0]
    result = yield from sparse.exchange_coded(
        positions, size + capacity, capacity, coded, decode
    )
    return _cut(result, positions, size)


def values_at(values: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the values, float `[capacity]`; 0 in free places."""
    return tf.gather(tf.pad(values, [[0, positions.shape[0]]]), positions)


def _cut(result: Result, positions: tf.Tensor, size: int) -> Result:
    count = tf.math.count_nonzero(positions < size, dtype=tf.int32)
    total, sent = (
        to_dense_tensor(result.sum)[:size],
        to_dense_tensor(result.sent)[:size],
    )
    chosen = position_mask(result.sent)[:size]
    return Result(total, sent, entries=count, chosen=chosen)
