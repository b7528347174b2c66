"""Payloads of selected entries: positions and values as words.

Positions are coded by Elias-Fano, values in one of `value_types` or by the method. A
method whose number of entries varies states a capacity (`capacity.py`).
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
"""Function from all workers' words, int32 `[N, w]`, to values, float `[N, k]`.

It also returns the checks of these values. That they are finite is checked anyway.
"""


# In the order of custom_ops/cpu/wire.h.
_NATIVE_TYPES = (
    *("float32", "float64", "bfloat16", "float16", "sign"),
    *("exempt", "mxint8", "mxfp4"),
)


def native_parameters(k: int, value_dtype: str | None) -> list[float]:
    """Return the first parameters of every native method that sends entries."""
    return [*NativeMethod.in_halves(k), _NATIVE_TYPES.index(value_dtype or "float32")]


def num_words(size: int, k: int | tf.Tensor, value_dtype: str) -> int | tf.Tensor:
    """Return the words of a payload of k of `size` entries."""
    streams = value_types.value_bits(value_dtype, k)
    return position_words(size, k) + sum(map(bits.num_stream_words, streams))


def position_words(size: int, k: int | tf.Tensor) -> int | tf.Tensor:
    """Return the words of k positions below `size`."""
    return sum(map(bits.num_stream_words, elias_fano.stream_bits(size, k)))


def send_entries(
    values: tf.Tensor,
    positions: tf.Tensor,
    k: int | tf.Tensor,
    value_dtype: str,
    max_magnitude: float = math.inf,
) -> Aggregation:
    """Gather and sum all workers' entries at ascending positions, int32 `[k]`."""
    size, dtype = values.shape[0], values.dtype
    selected = value_types.bound(tf.gather(values, positions), max_magnitude)
    coded = value_types.encode_values(selected, value_dtype)
    decode = decoder(value_dtype, k, dtype)
    return (yield from exchange_coded(positions, size, k, coded, decode))


def exchange_coded(
    positions: tf.Tensor,
    size: int,
    k: int | tf.Tensor,
    coded: tf.Tensor,
    decode: Decode,
) -> Aggregation:
    """Gather and sum all workers' entries, whose values the method has coded.

    Positions are int32 `[k]`, strictly ascending; `coded` is int32 `[w]`.
    """
    words = tf.concat([elias_fano.encode(positions, size, k), coded], axis=0)
    gathered = yield AllGather(words)
    split = position_words(size, k)
    all_positions, position_checks = elias_fano.decode(gathered[:, :split], size, k)
    all_values, value_checks = decode(gathered[:, split:])
    nonfinite = ~tf.math.is_finite(all_values)
    count = tf.math.count_nonzero(nonfinite, axis=1, dtype=tf.int32)
    finite = BufferCheck("values that are not finite", count, 0)
    all_positions, all_values = require(
        [*position_checks, *value_checks, finite], (all_positions, all_values)
    )
    pairs = zip(tf.unstack(all_positions), tf.unstack(all_values), strict=True)
    total = [SparseEntries(p, values, size) for p, values in pairs]
    sent = decode(coded[tf.newaxis])[0][0]
    return Result(total, SparseEntries(positions, sent, size), entries=k)


def decoder(value_dtype: str, k: int | tf.Tensor, dtype: tf.DType) -> Decode:
    """Return a function that decodes values of a type to `dtype`."""

    def decode(words: tf.Tensor) -> tuple[tf.Tensor, list[BufferCheck]]:
        values = value_types.decode_values(words, value_dtype, k, dtype)
        return values, value_types.value_checks(values, words, value_dtype, k)

    return decode
