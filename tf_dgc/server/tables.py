"""The server's tables: which rows a push changes, and which of them a worker lacks."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import keras_optimizers, row_rules
from tf_dgc.codecs.bits import to_words
from tf_dgc.server import rows
from tf_dgc.server.rows import Some


class Tables:
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
        if decays or not row_rules.knows(optimizer):
            raise ValueError("it changes other rows than those that are pushed")
        self._variables, self._optimizer = variables, optimizer
        self._forms = list(map(rows.table_of, variables))
        self._changed = [np.zeros([f.number], np.int64) for f in self._forms]
        self._seen: dict[int, int] = {}

    @property
    def specs(self) -> list[Some]:
        """Types of the rows of each, for a function that updates them."""
        return [
            Some(
                tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, f.width], f.dtype)
            )
            for f in self._forms
        ]

    def read(self, words: np.ndarray) -> tuple[list[Some], np.ndarray]:
        """Return the rows of each that a worker pushed, and the words behind them.

        Args:
            words: push, int32 `[w]`.

        Raises:
            ValueError: if they are none.
        """
        return rows.read(self._forms, words)

    def update(self, given: Sequence[Some], rate: tf.Tensor) -> None:
        """Update rows, within a function.

        Args:
            given: sum of the gradients of each.
            rate: learning rate, a scalar.
        """
        for variable, some in zip(self._variables, given, strict=True):
            row_rules.update(self._optimizer, variable, *some, rate)

    def note(self, given: Sequence[Some], clock: int) -> None:
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


def add_up(pushed: Sequence[Some]) -> Some:
    """Return the sum of what workers pushed of one table, worker after worker."""
    if len(pushed) == 1:
        return pushed[0]
    ids, places = np.unique(
        np.concatenate([p.ids for p in pushed]), return_inverse=True
    )
    values = np.concatenate([p.values for p in pushed])
    sums = np.zeros([len(ids), values.shape[1]], values.dtype)
    np.add.at(sums, places, values)
    return Some(ids, sums)
