"""Staleness: for how many steps an entry has waited since it was last sent."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.codecs.tensor import Tensor
from tf_dgc.distribute.worker_variables import PerWorkerVariable


@dataclasses.dataclass(frozen=True)
class Staleness:
    """Steps since entries were last sent, over all that are not exempt.

    An entry of which nothing is kept in `residual` waits for nothing and counts as 0,
    and so does one that was sent in the last step. Steps are those of this process: it
    does not survive a restart. Of this worker alone, so that workers differ.

    Attributes:
        mean: mean over entries, in steps.
        p99: 99th percentile over entries, in steps.
        max: waiting time of the entry that waits longest, in steps.
    """

    mean: float
    p99: float
    max: float


class LastSent:
    """Remembers in which step each entry was last sent, for `Staleness`.

    It costs 4 bytes per entry and, in a sparse step of `DGCOptimizer`, the decoding of
    the worker's own positions; other methods and dense steps pass over all entries. It
    is not part of a checkpoint: what is saved is the same with and without it.

    Args:
        tensors: tensors of the optimizer; nothing is remembered of exempt ones.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        # As floats, which GPUs can scatter to; exact up to 2**24 steps.
        self._steps = _per_worker([], "staleness_steps")
        self._last = {
            i: _per_worker([t.size], f"{t.label.replace('/', '_')}_last_sent")
            for i, t in enumerate(tensors)
            if not t.exempt
        }

    def count_step(self) -> None:
        """Begin a step; call it inside of one, like all that follow but `read`."""
        self._steps.assign(self._now() + 1.0)

    def record_all(self, indices: Sequence[int]) -> None:
        """Remember that these tensors were sent whole."""
        for _, last in self._of(indices):
            last.assign(tf.fill(last.shape, self._now()))

    def record_positions(
        self, indices: Sequence[int], positions: Sequence[tf.Tensor | None]
    ) -> None:
        """Remember what was sent, by positions `[k]` (None if exempt)."""
        found = dict(zip(indices, positions, strict=True))
        for i, last in self._of(indices):
            # In place: a step costs as much as is sent.
            tf.raw_ops.ResourceScatterUpdate(
                resource=last.value.handle, indices=found[i], updates=self._now()
            )

    def record_chosen(
        self, indices: Sequence[int], chosen: Sequence[tf.Tensor]
    ) -> None:
        """Remember what was sent, by whether each entry was, bool `[n]`."""
        found = dict(zip(indices, chosen, strict=True))
        for i, last in self._of(indices):
            old = tf.convert_to_tensor(last.value)
            last.assign(tf.where(found[i], self._now(), old))

    def read(self, residual: Sequence[PerWorkerVariable]) -> Staleness:
        """Return the staleness on this worker (over its replicas, if several).

        It is local: other workers need not call it.
        """
        ages = [np.zeros([1])]
        steps = _copies(self._steps)
        for i, last in self._last.items():
            kept = residual[i].local_values()
            copies = zip(steps, _copies(last), kept, strict=True)
            ages += [np.where(r.ravel() != 0, s - a, 0) for s, a, r in copies]
        found = np.concatenate(ages[1:] or ages)
        return Staleness(
            float(found.mean()), float(np.percentile(found, 99)), float(found.max())
        )

    def _now(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._steps.value)

    def _of(self, indices: Sequence[int]) -> list[tuple[int, keras.Variable]]:
        return [(i, self._last[i]) for i in indices if i in self._last]


def _per_worker(shape: list[int], name: str) -> keras.Variable:
    """Return a variable whose copies differ, and are read without a collective."""
    return keras.Variable(
        initializer="zeros",
        shape=shape,
        dtype="float32",
        trainable=False,
        synchronization="on_read",
        aggregation="only_first_replica",
        name=name,
    )


def _copies(variable: Any) -> list[np.ndarray]:
    local = tf.distribute.get_strategy().experimental_local_results
    return [copy.numpy() for copy in local(variable.value)]
