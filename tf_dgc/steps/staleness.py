"""Staleness: how many steps ago the entries of this worker were last sent."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.multiworker.worker_variables import PerWorkerVariable


@dataclasses.dataclass(frozen=True)
class Staleness:
    """Steps since entries were last sent, over all compressed tensors of this worker.

    An entry with a residual of zero counts as 0, and so does one that was sent in the
    last step. Steps are counted from the start of this process.

    Attributes:
        mean: mean over entries, in steps.
        p99: 99th percentile over entries, in steps.
        max: maximum over entries, in steps.
    """

    mean: float
    p99: float
    max: float


class LastSent:
    """Records the step in which each entry was last sent, for `Staleness`.

    It takes 4 bytes per entry, and in a sparse step of `DGCOptimizer` the decoding of
    the worker's own positions; other methods and dense steps write all entries. It is
    not saved in checkpoints.
    """

    def __init__(self, tensors: Sequence[TensorSpec]):
        # Floats, which GPUs can scatter to; exact up to 2**24 steps.
        self._steps = _per_worker_variable([], "staleness_steps")
        self._last_sent = {
            i: _per_worker_variable([t.size], f"{t.label.replace('/', '_')}_last_sent")
            for i, t in enumerate(tensors)
            if not t.uncompressed
        }

    def count_step(self) -> None:
        """Begin a step; call it and the `record` methods inside a training step."""
        self._steps.assign(self._now() + 1.0)

    def record_all(self, indices: Sequence[int]) -> None:
        """Record that all entries of these tensors were sent."""
        for _, variable in self._compressed(indices):
            variable.assign(tf.fill(variable.shape, self._now()))

    def record_positions(
        self, indices: Sequence[int], positions: Sequence[tf.Tensor | None]
    ) -> None:
        """Record sent entries by positions `[k]` (None for uncompressed tensors)."""
        by_index = dict(zip(indices, positions, strict=True))
        for i, variable in self._compressed(indices):
            # In place, so that it takes time in proportion to k.
            tf.raw_ops.ResourceScatterUpdate(
                resource=variable.value.handle,
                indices=by_index[i],
                updates=self._now(),
            )

    def record_chosen(
        self, indices: Sequence[int], chosen: Sequence[tf.Tensor]
    ) -> None:
        """Record sent entries by masks, bool `[n]`."""
        by_index = dict(zip(indices, chosen, strict=True))
        for i, variable in self._compressed(indices):
            old = tf.convert_to_tensor(variable.value)
            variable.assign(tf.where(by_index[i], self._now(), old))

    def read(self, residual: Sequence[PerWorkerVariable]) -> Staleness:
        """Return the staleness on this worker's replicas, without a collective."""
        ages = [np.zeros([1])]
        steps = _local_values(self._steps)
        for i, variable in self._last_sent.items():
            replicas = zip(
                steps,
                _local_values(variable),
                residual[i].local_values(),
                strict=True,
            )
            ages += [np.where(r.ravel() != 0, s - a, 0) for s, a, r in replicas]
        age = np.concatenate(ages[1:] or ages)
        return Staleness(
            float(age.mean()), float(np.percentile(age, 99)), float(age.max())
        )

    def _now(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._steps.value)

    def _compressed(self, indices: Sequence[int]) -> list[tuple[int, keras.Variable]]:
        return [(i, self._last_sent[i]) for i in indices if i in self._last_sent]


def _per_worker_variable(shape: list[int], name: str) -> keras.Variable:
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


def _local_values(variable: Any) -> list[np.ndarray]:
    local = tf.distribute.get_strategy().experimental_local_results
    return [copy.numpy() for copy in local(variable.value)]
