"""Payloads of a fixed capacity, for methods whose number of entries varies.

A payload has a fixed number of slots. Unused slots hold positions beyond the tensor, so
the positions below n tell the number of entries, and all payloads of a tensor have the
same size. If more entries qualify than there are slots, those with the highest scores
are sent, and the others stay in the residual.
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
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.largest import top_k
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent, tie_offset


def check_share(name: str, share: float) -> float:
    """Return a share of entries as a float, or raise `ValueError` outside (0, 1]."""
    return arguments.check_number(name, share, "(0, 1]", ", a share of the entries")


def check_value_dtype(value_dtype: str | None) -> None:
    """Raise `ValueError` for value types that do not allow unused slots."""
    value_types.check_choice(value_dtype)
    if value_dtype == "sign":
        raise ValueError(
            "The mean magnitude that `value_dtype='sign'` sends is of a fixed number "
            "of entries, which this method does not have. Choose None, 'float32', "
            "'bfloat16', 'float16', 'mxint8' or 'mxfp4'. "
            f"Received: value_dtype={show(value_dtype)}"
        )


def num_slots(size: int, share: float) -> int:
    """Return `max(1, ceil(share * size))`."""
    return num_sent(size, 1 - share)


def num_words(size: int, capacity: int, value_dtype: str) -> int:
    """Return the words of a payload; `ValueError` if unused positions exceed int32."""
    _check_slots(size, capacity)
    return sparse.num_words(size + capacity, capacity, value_dtype)


def position_words(size: int, capacity: int) -> int:
    """Return the words of the positions alone; raises as `num_words`."""
    _check_slots(size, capacity)
    return sparse.position_words(size + capacity, capacity)


def select(
    scores: tf.Tensor, mask: tf.Tensor, capacity: int, keys: RandomKeys
) -> tf.Tensor:
    """Return the positions of all entries in the mask, or of the highest scores.

    Scores are above 0 in the mask. Among equal scores, takes those that come first in
    cyclic order from a random offset, so that no position is favored. Returns int32
    `[capacity]`, strictly ascending; n or more in unused slots.
    """
    size = scores.shape[0]
    offset = tie_offset(size, keys)

    def select_all() -> tf.Tensor:
        positions = tf.cast(tf.where(mask)[:, 0], tf.int32)
        unused = size + tf.range(capacity - tf.size(positions))
        return tf.concat([positions, unused], axis=0)

    def select_highest() -> tf.Tensor:
        highest, _ = top_k(tf.where(mask, scores, 0), capacity, offset)
        unused = size + tf.range(capacity)
        return tf.sort(tf.where(tf.gather(mask, highest), highest, unused))

    if tracing.in_xla_context():  # which has no `tf.where` of one argument
        return select_highest()
    fits = tf.math.count_nonzero(mask) <= capacity
    return tf.ensure_shape(tf.cond(fits, select_all, select_highest), [capacity])


def send_entries(
    values: tf.Tensor, positions: tf.Tensor, value_dtype: str
) -> Aggregation:
    """Gather and sum all workers' entries at positions from `select`."""
    size, capacity = values.shape[0], positions.shape[0]
    padded = tf.pad(values, [[0, capacity]])
    result = yield from sparse.send_entries(padded, positions, capacity, value_dtype)
    return _remove_unused(result, positions, size)


def exchange_signs(
    values: tf.Tensor, positions: tf.Tensor, magnitude: tf.Tensor
) -> Aggregation:
    """Gather and sum all workers' entries as signs of one magnitude per worker.

    Positions are a result of `select`; the magnitude, 0 or more, is sent as float32.
    """
    negative = tf.cast(values_at(values, positions) < 0, tf.int32)
    word = tf.bitcast(value_types.round_to(magnitude, tf.float32), tf.int32)
    coded = tf.concat([word[tf.newaxis], bits.pack_bits(negative)], axis=0)
    decode = sparse.decoder("sign", positions.shape[0], values.dtype)
    return (yield from exchange_coded(positions, values.shape[0], coded, decode))


def exchange_coded(
    positions: tf.Tensor, size: int, coded: tf.Tensor, decode: sparse.Decode
) -> Aggregation:
    """Gather and sum all workers' entries, whose values the method has coded."""
    capacity = positions.shape[0]
    result = yield from sparse.exchange_coded(
        positions, size + capacity, capacity, coded, decode
    )
    return _remove_unused(result, positions, size)


def values_at(values: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the values, float `[capacity]`; 0 in unused slots."""
    return tf.gather(tf.pad(values, [[0, positions.shape[0]]]), positions)


def _check_slots(size: int, capacity: int) -> None:
    if size + capacity > tf.int32.max:
        raise ValueError(
            "Unused slots of a payload hold positions beyond the tensor, and positions "
            f"are int32: a tensor of {size} entries has room for "
            f"{tf.int32.max - size} slots. Choose a smaller capacity. "
            f"Received: {capacity} slots"
        )


def _remove_unused(result: Result, positions: tf.Tensor, size: int) -> Result:
    count = tf.math.count_nonzero(positions < size, dtype=tf.int32)
    total = to_dense_tensor(result.sum)[:size]
    sent = to_dense_tensor(result.sent)[:size]
    chosen = position_mask(result.sent)[:size]
    return Result(total, sent, entries=count, chosen=chosen)
