"""What methods that send some entries have in common: positions and values as words.

Positions are coded by Elias-Fano, values by any of `value_types` or as a method
says. A method whose number of entries varies states a capacity (`capacity.py`).
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from tf_dgc.codecs import bits, elias_fano, value_types
from tf_dgc.codecs.checks import BufferCheck, require
from tf_dgc.collectives.requests import Aggregation, AllGather, Result, SparseEntries
from tf_dgc.compressors.base import NativeMethod

Decode: TypeAlias = Callable[[tf.Tensor], tuple[tf.Tensor, list[BufferCheck]]]
"""Makes values, float `[N, k]`, of all workers' words, int32 `[N, w]`.

It also returns what must hold before they may be used; that they are finite is checked
in any case.
"""


# In the order of custom_ops/cpu/wire.h.
_NATIVE_TYPES = (
    *("float32", "float64", "bfloat16", "float16", "sign"),
    *("exempt", "mxint8", "mxfp4"),
)


def native_places(k: int, value_dtype: str | None) -> list[float]:
    """Return what the native engine takes first of every method that sends entries.

    Args:
        k: number of places of a payload.
        value_dtype: type of the values on the wire; None for that of the residual.
    """
    return [*NativeMethod.in_halves(k), _NATIVE_TYPES.index(value_dtype or "float32")]


def num_words(size: int, k: int | tf.Tensor, value_dtype: str) -> int | tf.Tensor:
    """Return the words of a payload of k of `size` entries.

    Args:
        size: number of entries n.
        k: number of positions, 1 <= k <= n; an int, or a scalar int32 tensor.
        value_dtype: type of the values, one of `value_types.CHOICES`, or "float64".
    """
    streams = value_types.value_bits(value_dtype, k)
    return position_words(size, k) + sum(map(bits.num_stream_words, streams))


def position_words(size: int, k: int | tf.Tensor) -> int | tf.Tensor:
    """Return the words that k positions below `size` take."""
    return sum(map(bits.num_stream_words, elias_fano.stream_bits(size, k)))


def exchange(
    values: tf.Tensor,
    positions: tf.Tensor,
    k: int | tf.Tensor,
    value_dtype: str,
    largest: float = math.inf,
) -> Aggregation:
    """Gather chosen entries of all workers and sum them.

    Args:
        values: gradient, float `[n]`.
        positions: positions to be sent, int32 `[k]`, strictly ascending.
        k: number of positions; an int, or a scalar int32 tensor.
        value_dtype: type of the values on the wire.
        largest: bound of what is sent of an entry, above 0.
    """
    size, dtype = values.shape[0], values.dtype
    chosen = value_types.bound(tf.gather(values, positions), largest)
    coded = value_types.encode_values(chosen, value_dtype)
    decode = decoder(value_dtype, k, dtype)
    return (yield from exchange_coded(positions, size, k, coded, decode))


def exchange_coded(
    positions: tf.Tensor,
    size: int,
    k: int | tf.Tensor,
    coded: tf.Tensor,
    decode: Decode,
) -> Aggregation:
    """Gather entries whose values a method has coded itself, and sum them.

    Args:
        positions: positions to be sent, int32 `[k]`, strictly ascending.
        size: number of entries n, also of the result.
        k: number of positions; an int, or a scalar int32 tensor.
        coded: values as words, int32 `[w]`.
        decode: function that decodes `coded`.
    """
    words = tf.concat([elias_fano.encode(positions, size, k), coded], axis=0)
    gathered = yield AllGather(words)
    split = position_words(size, k)
    where, checks = elias_fano.decode(gathered[:, :split], size, k)
    found, more = decode(gathered[:, split:])
    where, found = require([*checks, *more, _finite(found)], (where, found))
    pairs = zip(tf.unstack(where), tf.unstack(found), strict=True)
    everyone = [SparseEntries(at, values, size) for at, values in pairs]
    mine = decode(coded[tf.newaxis])[0][0]
    return Result(everyone, SparseEntries(positions, mine, size), entries=k)


def decoder(value_dtype: str, k: int | tf.Tensor, dtype: tf.DType) -> Decode:
    """Return what decodes values of this type to `dtype`."""

    def decode(words: tf.Tensor) -> tuple[tf.Tensor, list[BufferCheck]]:
        found = value_types.decode_values(words, value_dtype, k, dtype)
        return found, value_types.value_checks(found, words, value_dtype, k)

    return decode


def _finite(values: tf.Tensor) -> BufferCheck:
    bad = tf.math.count_nonzero(~tf.math.is_finite(values), axis=1, dtype=tf.int32)
    return BufferCheck("values that are not finite", bad, 0)
