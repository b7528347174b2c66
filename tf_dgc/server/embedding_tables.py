"""The server's tables: which rows a push changes, and which of them a worker lacks."""

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


class EmbeddingTables:
    """Variables of which rows are pushed and pulled.

    It remembers at which update each row was changed last, and which one each worker
    has seen: a number for each row, and one for each worker.

    Args:
        variables: variables that are tables.
        optimizer: inner optimizer, built.

    Raises:
        ValueError: for an optimizer that changes other rows than are pushed.
    """

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
        self._forms = list(map(embedding_rows.table_spec, variables))
        self._changed = [np.zeros([f.number], np.int64) for f in self._forms]
        self._seen: dict[int, int] = {}

    @property
    def specs(self) -> list[TableRows]:
        """Types of the rows of each, for a function that updates them."""
        return [
            TableRows(
                tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, f.width], f.dtype)
            )
            for f in self._forms
        ]

    def read(self, words: np.ndarray) -> tuple[list[TableRows], np.ndarray]:
        """Return the rows of each that a worker pushed, and the words behind them.

        Args:
            words: push, int32 `[w]`.

        Raises:
            ValueError: if they are none.
        """
        return embedding_rows.read_rows(self._forms, words)

    def update(self, given: Sequence[TableRows], rate: tf.Tensor) -> None:
        """Update rows, within a function.

        Args:
            given: sum of the gradients of each.
            rate: learning rate, a scalar.
        """
        for variable, some in zip(self._variables, given, strict=True):
            keras_rules.update_rows(self._optimizer, variable, *some, rate)

    def note(self, given: Sequence[TableRows], clock: int) -> None:
        """Note that rows have been changed, by the update that made it this clock."""
        for changed, some in zip(self._changed, given, strict=True):
            changed[some.ids] = clock

    def reset(self, worker: int, clock: int) -> None:
        """Note that a worker has been given all weights."""
        self._seen[worker] = clock

    def forget(self, worker: int) -> None:
        """Forget what a worker has, which is gone."""
        self._seen.pop(worker, None)

    def pull(self, worker: int, clock: int) -> np.ndarray:
        """Return the rows that a worker lacks, which it has then, int32 `[w]`."""
        since, self._seen[worker] = self._seen[worker], clock
        parts = []
        every = zip(self._forms, self._variables, self._changed, strict=True)
        for form, variable, changed in every:
            ids = np.flatnonzero(changed > since).astype(np.int32)
            found = tf.gather(tf.convert_to_tensor(variable.value), ids)
            words = to_words(tf.cast(found, form.dtype)).numpy()
            parts += [np.array([len(ids)], np.int32), ids, words]
        return np.concatenate(parts)


def sum_rows(pushed: Sequence[TableRows]) -> TableRows:
    """Return the sum of what workers pushed of one table, worker after worker."""
    if len(pushed) == 1:
        return pushed[0]
    ids, places = np.unique(
        np.concatenate([p.ids for p in pushed]), return_inverse=True
    )
    values = np.concatenate([p.values for p in pushed])
    sums = np.zeros([len(ids), values.shape[1]], values.dtype)
    np.add.at(sums, places, values)
    return TableRows(ids, sums)


# --- Which variables are tables, of which rows travel, and what they need.

_ROWS = (
    "plain SGD or Adagrad, without weight decay of that variable, of which one step "
    "changes no other rows than the gradient has"
)


def check_table_settings(
    names: Any,
    inner: keras.optimizers.Optimizer,
    mode: str,
    correction: str | None,
) -> list[str]:
    """Return the names of tables.

    Args:
        names: regular expressions; or None, for no tables.
        inner: inner optimizer, as it was passed.
        mode: way in which workers wait for each other.
        correction: correction for staleness, or None.

    Raises:
        ValueError: unless they are texts, or for settings that do not go with rows.
    """
    if not names:
        return []
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            "`rows` must be a list of texts, of which one has to be found in a "
            'variable\'s path, for example `["embeddings"]`. Received: '
            f"rows={show(names)}"
        )
    if not keras_rules.has_row_rule(inner):
        raise ValueError(
            f"`rows` needs {_ROWS}; momentum goes on with all of them. Use another "
            "inner optimizer, or no `rows`: then gradients go as those of other "
            f"variables. Received: {type(inner).__name__} with "
            f"momentum={getattr(inner, 'momentum', None)}"
        )
    if mode == "backup" or correction == "delay":
        raise ValueError(
            "Rows are sent whole, and nothing is kept of them: so there is no residual "
            'for what comes too late with mode "backup", and none of the copies that '
            '`correction="delay"` compares. Use another mode or correction, or no '
            f"`rows`. Received: mode={show(mode)}, correction={show(correction)}"
        )
    return list(names)


def find_tables(
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    rule: keras.optimizers.Optimizer,
) -> list[bool]:
    """Return whether each variable is a table.

    Args:
        names: regular expressions, of which one has to be found in its path.
        variables: variables of the model.
        rule: inner optimizer.

    Raises:
        ValueError: if one is found nowhere, or what is found cannot be a table.
    """
    found = [any(re.search(n, v.path) for n in names) for v in variables]
    for name in names:
        if not any(re.search(name, v.path) for v in variables):
            raise ValueError(
                "`rows` names variables of the model, by a part of their paths. "
                f"Received: {show(name)}, which is in none of "
                f"{[v.path for v in variables]}"
            )
    for v in [v for v, is_table in zip(variables, found, strict=True) if is_table]:
        decays = rule.weight_decay and keras_optimizers.uses_weight_decay(rule, v.value)
        if len(v.shape) < 2 or decays:
            raise ValueError(
                f"`rows` is for variables of rank 2 or more, and needs {_ROWS} "
                "(`exclude_from_weight_decay`). Received: a variable "
                f"{v.path} of shape {tuple(v.shape)}, weight_decay={rule.weight_decay}"
            )
    return found


def check_table_gradients(
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
    tabular: Sequence[bool],
) -> None:
    """Raise `ValueError` unless the gradients of tables have rows.

    Args:
        grads: gradients of the variables.
        variables: variables of the model.
        tabular: whether each is a table.
    """
    for g, v, is_table in zip(grads, variables, tabular, strict=True):
        if is_table and not isinstance(g, tf.IndexedSlices):
            raise ValueError(
                "`rows` is for variables that are looked up and nothing else, as by "
                "`keras.layers.Embedding` without a regularizer; of others all rows "
                f"have a gradient. Leave it out. Received: variable {v.path} with "
                f"gradient {show(g)}"
            )
