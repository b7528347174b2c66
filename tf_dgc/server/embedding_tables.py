"""Embedding tables: variables of which only rows are pushed and pulled."""

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import keras_optimizers, keras_rules
from tf_dgc.arguments import show
from tf_dgc.codecs.bits import to_words
from tf_dgc.server import embedding_rows
from tf_dgc.server.embedding_rows import TableRows
from tf_dgc.server.staleness_correction import StalenessCorrection


class EmbeddingTables:
    """The server's tables: last update of each row, last pull of each worker."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        optimizer: keras.optimizers.Optimizer,
    ):
        decays = bool(optimizer.weight_decay) and any(
            keras_optimizers.uses_weight_decay(optimizer, v.value) for v in variables
        )
        if decays or not keras_rules.has_row_rule(optimizer):
            raise ValueError("it changes other rows than those that are pushed")
        self._variables, self._optimizer = variables, optimizer
        self._specs = list(map(embedding_rows.table_spec, variables))
        self._changed_at = [np.zeros([s.num_rows], np.int64) for s in self._specs]
        self._pulled_at: dict[int, int] = {}

    @property
    def row_specs(self) -> list[TableRows]:
        """`tf.TensorSpec`s of each table's rows, for a function's signature."""
        return [
            TableRows(
                tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, s.width], s.dtype)
            )
            for s in self._specs
        ]

    def read(self, words: np.ndarray) -> tuple[list[TableRows], np.ndarray]:
        """Read a push; see `embedding_rows.read_rows`."""
        return embedding_rows.read_rows(self._specs, words)

    def update(self, rows: Sequence[TableRows], learning_rate: tf.Tensor) -> None:
        """Apply the inner optimizer's rule to some rows of each table."""
        for variable, gradient in zip(self._variables, rows, strict=True):
            keras_rules.update_rows(self._optimizer, variable, *gradient, learning_rate)

    def record(self, rows: Sequence[TableRows], clock: int) -> None:
        """Record that the update with number `clock` changed some rows."""
        for changed_at, gradient in zip(self._changed_at, rows, strict=True):
            changed_at[gradient.ids] = clock

    def reset(self, worker: int, clock: int) -> None:
        """Record that a worker has all current weights."""
        self._pulled_at[worker] = clock

    def forget(self, worker: int) -> None:
        """Delete the record of a worker that is gone."""
        self._pulled_at.pop(worker, None)

    def pull(self, worker: int, clock: int) -> np.ndarray:
        """Return the rows changed since a worker's last pull, int32 `[w]`."""
        previous, self._pulled_at[worker] = self._pulled_at[worker], clock
        parts = []
        for spec, variable, changed_at in zip(
            self._specs, self._variables, self._changed_at, strict=True
        ):
            ids = np.flatnonzero(changed_at > previous).astype(np.int32)
            values = tf.gather(tf.convert_to_tensor(variable.value), ids)
            words = to_words(tf.cast(values, spec.dtype)).numpy()
            parts += [np.array([len(ids)], np.int32), ids, words]
        return np.concatenate(parts)


def sum_rows(pushes: Sequence[TableRows]) -> TableRows:
    """Return the sum of several workers' rows of one table, in the workers' order."""
    if len(pushes) == 1:
        return pushes[0]
    ids, places = np.unique(
        np.concatenate([p.ids for p in pushes]), return_inverse=True
    )
    values = np.concatenate([p.values for p in pushes])
    sums = np.zeros([len(ids), values.shape[1]], values.dtype)
    np.add.at(sums, places, values)
    return TableRows(ids, sums)


_REQUIRED_OPTIMIZER = (
    "plain SGD or Adagrad without weight decay of that variable, so that a step "
    "changes only rows that have a gradient"
)


def check_table_settings(
    patterns: Any,
    inner: keras.optimizers.Optimizer,
    mode: str,
    correction: StalenessCorrection | None,
) -> list[str]:
    """Return `rows` as a list."""
    if not patterns:
        return []
    if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
        raise ValueError(
            "`rows` must be a list of regular expressions to find in variables' paths, "
            f'for example `["embeddings"]`. Received: rows={show(patterns)}'
        )
    if not keras_rules.has_row_rule(inner):
        raise ValueError(
            f"`rows` needs {_REQUIRED_OPTIMIZER}; momentum changes all rows. Use "
            "another inner optimizer, or omit `rows` to send the gradients like those "
            f"of other variables. Received: {type(inner).__name__} with "
            f"momentum={getattr(inner, 'momentum', None)}"
        )
    if mode == "backup" or (correction and correction.rule == "delay"):
        raise ValueError(
            '`rows` cannot be combined with `mode="backup"`, since rows have no '
            'residual for late pushes, nor with `StalenessCorrection("delay")`, which '
            "compares whole weights. Use another mode or correction, or omit `rows`. "
            f"Received: mode={show(mode)}, staleness_correction={correction!r}"
        )
    return list(patterns)


def find_tables(
    patterns: Sequence[str],
    variables: Sequence[keras.Variable],
    inner: keras.optimizers.Optimizer,
) -> list[bool]:
    """Return whether each variable is a table."""
    for pattern in patterns:
        if not any(re.search(pattern, v.path) for v in variables):
            raise ValueError(
                "Each regular expression in `rows` must match a part of the path of "
                f"one of the model's variables. Received: {show(pattern)}, which "
                f"matches none of {[v.path for v in variables]}"
            )
    is_table = [any(re.search(p, v.path) for p in patterns) for v in variables]
    for v in [v for v, table in zip(variables, is_table, strict=True) if table]:
        decays = inner.weight_decay and keras_optimizers.uses_weight_decay(
            inner, v.value
        )
        if len(v.shape) < 2 or decays:
            raise ValueError(
                "`rows` must name variables of rank 2 or more, and needs "
                f"{_REQUIRED_OPTIMIZER} (`exclude_from_weight_decay`). Received: "
                f"variable {v.path} of shape {tuple(v.shape)}, "
                f"weight_decay={inner.weight_decay}"
            )
    return is_table


def check_table_gradients(
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
    is_table: Sequence[bool],
) -> None:
    """Raise `ValueError` unless the gradients of tables are `tf.IndexedSlices`."""
    for g, v, table in zip(grads, variables, is_table, strict=True):
        if table and not isinstance(g, tf.IndexedSlices):
            raise ValueError(
                "`rows` must name variables that are used for lookups alone, such as "
                "those of `keras.layers.Embedding` without a regularizer; otherwise "
                f"all rows have a gradient. Omit it. Received: variable {v.path} with "
                f"gradient {show(g)}"
            )
