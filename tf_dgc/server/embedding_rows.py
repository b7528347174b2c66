"""Rows of embedding tables as words.

For each table a message has the number of rows, their ids in ascending order, and their
values, as int32 words. Only rows that a step looked up are sent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.codecs.bits import from_words, num_words_of, to_words
from tf_dgc.steps.accumulation import Gradient


class TableSpec(NamedTuple):
    """Spec of a table, equal on the server and the workers."""

    num_rows: int
    width: int  # number of entries of a row
    dtype: tf.DType  # type of the sent values, float32 or float64

    @property
    def row_words(self) -> int:
        """Number of words of a row's values."""
        return num_words_of(self.dtype, self.width)


class TableRows(NamedTuple):
    """Some rows of a table."""

    ids: np.ndarray | tf.Tensor  # ids of the rows, ascending, int32 `[r]`
    values: np.ndarray | tf.Tensor  # values, `[r, width]`


def table_spec(variable: keras.Variable) -> TableSpec:
    """Return the spec of a variable of rank 2 or more."""
    num_rows, *rest = variable.shape
    dtype = tf.float64 if variable.dtype == "float64" else tf.float32
    return TableSpec(num_rows, int(np.prod(rest)), dtype)


def encode_rows(
    tables: Sequence[TableSpec],
    gradients: Sequence[Gradient],
    scales: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Return rows as int32 words `[w]`; a NaN scale sends no rows of that table."""
    # The gradients are `tf.IndexedSlices` with ascending and distinct indices.
    parts = []
    for table, gradient, scale in zip(tables, gradients, scales, strict=True):
        num_rows = tf.where(tf.math.is_finite(scale), tf.size(gradient.indices), 0)
        values = tf.cast(gradient.values[:num_rows], table.dtype)
        values *= tf.cast(scale, table.dtype)
        ids = tf.cast(gradient.indices[:num_rows], tf.int32)
        parts += [num_rows[tf.newaxis], ids, to_words(values)]
    return tf.concat(parts, axis=0)


def assign_rows(
    tables: Sequence[TableSpec], variables: Sequence[keras.Variable], words: tf.Tensor
) -> None:
    """Assign pulled rows, int32 `[w]`, to a worker's variables."""
    for table, variable in zip(tables, variables, strict=True):
        num_rows = words[0]
        end = 1 + num_rows * (1 + table.row_words)
        shape = tf.stack([num_rows, *variable.shape[1:]])
        values = from_words(words[1 + num_rows : end], tf.zeros(shape, table.dtype))
        tf.raw_ops.ResourceScatterUpdate(
            resource=variable.value.handle,
            indices=words[1 : 1 + num_rows],
            updates=tf.cast(values, variable.dtype),
        )
        words = words[end:]


def read_rows(
    tables: Sequence[TableSpec], words: np.ndarray
) -> tuple[list[TableRows], np.ndarray]:
    """Return each table's rows from a push, int32 `[w]`, and the remaining words."""
    rows = []
    for table in tables:
        num_rows = int(words[0]) if len(words) else -1
        end = 1 + num_rows * (1 + table.row_words)
        if not 0 <= num_rows <= table.num_rows or end > len(words):
            raise ValueError(
                f"{num_rows} rows of a table of {table.num_rows}, in {len(words)} words"
            )
        ids = words[1 : 1 + num_rows]
        in_range = not num_rows or (ids[0] >= 0 and ids[-1] < table.num_rows)
        if not in_range or np.any(ids[1:] <= ids[:-1]):
            raise ValueError(
                "ids of rows are not ascending, or not within the table's "
                f"{table.num_rows} rows"
            )
        values = words[1 + num_rows : end].view(table.dtype.as_numpy_dtype)
        rows.append(TableRows(ids, values.reshape(num_rows, table.width)))
        words = words[end:]
    return rows, words
