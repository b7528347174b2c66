"""What methods that send some entries have in common: positions and values as words.

Positions are coded by Elias-Fano, values by any of `tf_dgc.values`. A method whose
number of entries varies states a capacity k, fills up with positions whose value is 0,
and keeps in the residual what does not fit.
"""

import tensorflow as tf

from tf_dgc import bitstream, elias_fano
from tf_dgc import values as coding
from tf_dgc.checks import gate
from tf_dgc.compressors.base import Exchange, Gather, Result


def num_words(size: int, k: int | tf.Tensor, value_dtype: str) -> int | tf.Tensor:
    """Return the words of a payload of k of `size` entries.

    Args:
        size: n.
        k: 1 <= k <= n, an int or a scalar int32 tensor.
        value_dtype: one of `tf_dgc.values.CHOICES`, or "float64".
    """
    streams = elias_fano.stream_bits(size, k) + coding.stream_bits(value_dtype, k)
    return sum(map(bitstream.num_words, streams))


def exchange(
    values: tf.Tensor, positions: tf.Tensor, k: int | tf.Tensor, value_dtype: str
) -> Exchange:
    """Gather chosen entries of all workers and sum them.

    Args:
        values: float `[n]`.
        positions: int32 `[k]`, strictly ascending.
        k: how many; an int, or a scalar int32 tensor.
        value_dtype: of the values on the wire.
    """
    size, dtype = values.shape[0], values.dtype
    coded = coding.encode(tf.gather(values, positions), value_dtype)
    words = tf.concat([elias_fano.encode(positions, size, k), coded], axis=0)
    gathered = yield Gather(words)
    where, found = _decode(gathered, size, k, value_dtype, dtype)
    total = tf.zeros([size], dtype)
    for at, part in zip(tf.unstack(where), tf.unstack(found), strict=True):
        total = tf.tensor_scatter_nd_add(total, at[:, tf.newaxis], part)
    mine = coding.decode(coded[tf.newaxis], value_dtype, k, dtype)[0]
    sent = tf.scatter_nd(positions[:, tf.newaxis], mine, [size])
    return Result(total, sent, entries=k)


def _decode(
    gathered: tf.Tensor,
    size: int,
    k: int | tf.Tensor,
    value_dtype: str,
    dtype: tf.DType,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return positions and values, `[N, k]` each, of N workers' words."""
    streams = elias_fano.stream_bits(size, k)
    split = sum(map(bitstream.num_words, streams))
    where, checks = elias_fano.decode(gathered[:, :split], size, k)
    words = gathered[:, split:]
    found = coding.decode(words, value_dtype, k, dtype)
    checks += coding.checks(found, words, value_dtype)
    where, found = gate(checks, (where, found))
    return where, found
