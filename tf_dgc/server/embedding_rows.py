"""Rows: tables of which a step touches some rows, which travel whole, by their ids.

Of each table that are the number of rows, their ids, ascending, and their values, as
int32 words. So neither side, nor the wire, has more than was looked up; but for a
worker's own table, and what the server looks through to find what has changed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.codecs.bits import from_words, num_words_of, to_words
from tf_dgc.steps.accumulation import Gradient


class TableSpec(NamedTuple):
    """What both sides know of a table.

    Attributes:
        number: number of its rows.
        width: number of entries of a row.
        dtype: type in which values travel, float32 or float64.
    """

    number: int
    width: int
    dtype: tf.DType

    @property
    def row_words(self) -> int:
        """Words of the values of a row."""
        return num_words_of(self.dtype, self.width)


class TableRows(NamedTuple):
    """Some rows of a table.

    Attributes:
        ids: ids of the rows, ascending, int32 `[r]`.
        values: values, `[r, width]`.
    """

    ids: np.ndarray | tf.Tensor
    values: np.ndarray | tf.Tensor


def table_spec(variable: keras.Variable) -> TableSpec:
    """Return what is to be known of a variable of rank 2 or more."""
    number, *rest = variable.shape
    dtype = tf.float64 if variable.dtype == "float64" else tf.float32
    return TableSpec(number, int(np.prod(rest)), dtype)


def encode_rows(
    tables: Sequence[TableSpec],
    gradients: Sequence[Gradient],
    scales: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Return rows of gradients as words, int32 `[w]`; none of what is not finite.

    Args:
        tables: tables that they are of.
        gradients: `tf.IndexedSlices` whose indices are ascending and distinct.
        scales: factor of each, a scalar, NaN if the step's gradient is left out.
    """
    parts = []
    for table, gradient, scale in zip(tables, gradients, scales, strict=True):
        number = tf.where(tf.math.is_finite(scale), tf.size(gradient.indices), 0)
        values = tf.cast(gradient.values[:number], table.dtype)
        values *= tf.cast(scale, table.dtype)
        ids = tf.cast(gradient.indices[:number], tf.int32)
        parts += [number[tf.newaxis], ids, to_words(values)]
    return tf.concat(parts, axis=0)


def take_rows(
    tables: Sequence[TableSpec], variables: Sequence[keras.Variable], words: tf.Tensor
) -> None:
    """Set some rows of a worker's variables.

    Args:
        tables: tables that they are.
        variables: variables of the worker.
        words: rows, int32 `[w]`.
    """
    for table, variable in zip(tables, variables, strict=True):
        number = words[0]
        end = 1 + number * (1 + table.row_words)
        shape = tf.stack([number, *variable.shape[1:]])
        values = from_words(words[1 + number : end], tf.zeros(shape, table.dtype))
        tf.raw_ops.ResourceScatterUpdate(
            resource=variable.value.handle,
            indices=words[1 : 1 + number],
            updates=tf.cast(values, variable.dtype),
        )
        words = words[end:]


def read_rows(
    tables: Sequence[TableSpec], words: np.ndarray
) -> tuple[list[TableRows], np.ndarray]:
    """Return the rows of each table that a worker pushed, and the words behind them.

    Args:
        tables: tables that they are of.
        words: push, int32 `[w]`.

    Raises:
        ValueError: if there are too few words, or ids that are not ascending or not
            those of rows.
    """
    found = []
    for table in tables:
        number = int(words[0]) if len(words) else -1
        end = 1 + number * (1 + table.row_words)
        if not 0 <= number <= table.number or end > len(words):
            raise ValueError(
                f"{number} rows of a table of {table.number}, in {len(words)} words"
            )
        ids = words[1 : 1 + number]
        within = not number or (ids[0] >= 0 and ids[-1] < table.number)
        if not within or np.any(ids[1:] <= ids[:-1]):
            raise ValueError(f"rows are not ascending ones of {table.number}")
        values = words[1 + number : end].view(table.dtype.as_numpy_dtype)
        found.append(TableRows(ids, values.reshape(number, table.width)))
        words = words[end:]
    return found, words
