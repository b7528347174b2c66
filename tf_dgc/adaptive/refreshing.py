"""Refresh: what workers divide by becomes the same on all of them, now and then.

Where data differ between workers, so do their second moments, and updates that are
divided by different roots cancel at another point than gradients do. A refresh is a
dense exchange, so it is rare: after corrected steps 1, 2, 4, ..., 512, and every
1,024th. In between each worker follows its own gradients, from what all had in common.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_dgc.codecs import value_types
from tf_dgc.collectives.requests import Gather, Spread, Sum
from tf_dgc.distribute.communicator import Communicator
from tf_dgc.distribute.worker_variables import PerWorkerVariable
from tf_dgc.inner import conditions

_PERIOD = 1024


def refresh_if_due(
    communicator: Communicator,
    moments: Sequence[PerWorkerVariable],
    steps: tf.Tensor,
    largest: bool,
) -> int | tf.Tensor:
    """Give all workers the same moments, if it is time; call it in replica context.

    All travel together, as bfloat16, or as float64 if one of them is that.

    Args:
        communicator: communicator of the optimizer.
        moments: moments of this worker, of entries that are 0 or more.
        steps: number of corrected steps, this one included, the same on all workers; a
            scalar int64 tensor.
        largest: whether what they have in common is the largest on any worker; else it
            is the mean.

    Returns:
        Bytes that this worker hands to the collectives, 0 in most steps.
    """
    number = communicator.num_workers
    if number == 1 or not moments:
        return 0
    wide = any(m.dtype == "float64" for m in moments)
    dtype = tf.float64 if wide else tf.bfloat16
    sizes = [m.shape.num_elements() for m in moments]

    def refresh() -> None:
        values = [_take(m, dtype, 1.0 if largest else 1.0 / number) for m in moments]
        agree = _agree_on_largest if largest else _agree_on_sum
        agreed = tf.split(agree(communicator, tf.concat(values, axis=0)), sizes)
        for moment, new in zip(moments, agreed, strict=True):
            own = _cast(new, tf.as_dtype(moment.dtype))
            moment.assign(tf.reshape(own, moment.shape))

    due = is_due(steps)
    conditions.call_if(due, refresh)
    entries = sum(sizes)
    if largest:
        entries = _padded(entries, number) + _padded(entries, number) // number
    return tf.where(due, tf.constant(entries * dtype.size, tf.int64), 0)


def is_due(steps: tf.Tensor) -> tf.Tensor:
    """Return whether workers refresh after so many corrected steps, scalar bool."""
    is_power = tf.equal(tf.bitwise.bitwise_and(steps, steps - 1), 0)
    whole_periods = tf.equal(steps % _PERIOD, 0)
    return tf.logical_and(steps > 0, tf.where(steps < _PERIOD, is_power, whole_periods))


def _take(moment: PerWorkerVariable, dtype: tf.DType, share: float) -> tf.Tensor:
    """Return a share of a moment, `[n]`; what is not finite is no part of it."""
    values = tf.reshape(moment.local(), [-1])
    finite = tf.where(tf.math.is_finite(values), values, tf.zeros_like(values))
    return _cast(finite * tf.constant(share, finite.dtype), dtype)


def _cast(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.size < values.dtype.size:
        return value_types.narrow(values, dtype)
    return tf.cast(values, dtype)


def _agree_on_sum(communicator: Communicator, values: tf.Tensor) -> tf.Tensor:
    total = communicator.answer(Sum(values))
    return tf.minimum(total, values.dtype.max)  # N shares of the largest number


def _agree_on_largest(communicator: Communicator, values: tf.Tensor) -> tf.Tensor:
    """Let each worker find the largest in a shard, and gather the shards."""
    number, size = communicator.num_workers, values.shape[0]
    padded = tf.pad(values, [[0, _padded(size, number) - size]])
    rows = communicator.answer(Spread(tf.reshape(padded, [number, -1])))
    words = _to_words(tf.reduce_max(rows, axis=0))
    shards = communicator.answer(Gather(words))
    return _from_words(tf.reshape(shards, [-1]), values.dtype)[:size]


def _padded(size: int, number: int) -> int:
    """Return the entries of as many equal shards, of whole words each."""
    return -(-size // (2 * number)) * 2 * number


def _to_words(values: tf.Tensor) -> tf.Tensor:
    pairs = tf.reshape(values, [-1, 2]) if values.dtype.size == 2 else values
    return tf.reshape(tf.bitcast(pairs, tf.int32), [-1])


def _from_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    pairs = tf.reshape(words, [-1, 2]) if dtype.size == 8 else words
    return tf.reshape(tf.bitcast(pairs, dtype), [-1])
