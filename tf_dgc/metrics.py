"""Monitor: what was sent, counted where it is handed to the collective."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.multiworker.worker_variables import PerWorkerVariable


@dataclasses.dataclass(frozen=True)
class CompressionStats:
    """What one worker sent. Equal on all workers.

    Attributes:
        steps: number of optimizer steps that were counted.
        entries: number of gradient entries sent, in total.
        bytes: number of bytes handed to the collective, in total.
        dense_bytes: number of bytes a dense all-reduce would have been handed, in
            total.
        nonfinite: number of gradients, over all workers, that were left out because
            they held NaN or Inf, or where they made the residual overflow. Where steps
            overlap, the most in one bucket; of workers that gossip, itself and its
            neighbours.
        entries_per_step: number of entries sent in the last step.
        bytes_per_step: number of bytes handed over in the last step.
        dense_bytes_per_step: number of bytes of a dense all-reduce in the last step.
        exchange: name of the exchange; with "auto" the one that was chosen, behind
            "float16, " if nothing is compressed; and the number of buckets of steps
            that overlap.
    """

    steps: int
    entries: int
    bytes: int
    dense_bytes: int
    nonfinite: int
    entries_per_step: int
    bytes_per_step: int
    dense_bytes_per_step: int
    exchange: str = "ring"

    @property
    def ratio(self) -> float:
        """Dense bytes by sent bytes, in the last step; NaN before the first."""
        return _ratio(self.dense_bytes_per_step, self.bytes_per_step)

    @property
    def total_ratio(self) -> float:
        """Dense bytes by sent bytes since the start, warm-up included."""
        return _ratio(self.dense_bytes, self.bytes)


_FIELDS = [f.name for f in dataclasses.fields(CompressionStats) if f.type is int]
NONFINITE = _FIELDS.index("nonfinite")


def create_counters() -> keras.Variable:
    """Return the variable that holds `CompressionStats`, equal on all workers."""
    return create_count("compression_counters", [len(_FIELDS)])


def create_count(name: str, shape: Sequence[int] = ()) -> keras.Variable:
    """Return a variable of counts, int64, that are equal on all workers, and 0.

    Args:
        name: name of the variable.
        shape: shape of the variable; one number by default.
    """
    return keras.Variable(
        initializer="zeros",
        shape=shape,
        dtype="int64",
        trainable=False,
        aggregation="only_first_replica",
        name=name,
    )


def count_step(
    counters: keras.Variable,
    entries: int | tf.Tensor,
    sent_bytes: int | tf.Tensor,
    dense_bytes: int,
    nonfinite: tf.Tensor,
) -> None:
    """Add one step to the counters.

    Args:
        counters: variable from `make_counters`.
        entries: number of entries sent in this step, an int or a scalar integer tensor.
        sent_bytes: size of the buffer that was handed to the collective, likewise.
        dense_bytes: size that a dense all-reduce would have had, an int.
        nonfinite: number of workers whose gradient was dropped, a scalar integer
            tensor.
    """
    step = tf.stack(
        [tf.cast(x, tf.int64) for x in (1, entries, sent_bytes, dense_bytes, nonfinite)]
    )
    totals = tf.convert_to_tensor(counters.value)[:5] + step
    counters.assign(tf.concat([totals, step[1:4]], axis=0))


def dense_bytes(variables: Sequence[keras.Variable]) -> int:
    """Return what a dense all-reduce of the gradients would be handed."""
    return sum(v.shape.num_elements() * tf.as_dtype(v.dtype).size for v in variables)


def warn_once_if_nonfinite(
    counters: keras.Variable, finite: tf.Tensor, iteration: tf.Tensor
) -> None:
    """Say once on this worker's standard error that its gradient was dropped.

    Args:
        counters: variable from `make_counters`, before this step is counted.
        finite: scalar bool, whether this worker's gradient was finite.
        iteration: number of the step, a scalar integer tensor.
    """
    if tracing.in_xla_context():
        return  # XLA cannot print; `stats.nonfinite` counts all the same
    first = tf.logical_and(tf.logical_not(finite), counters.value[NONFINITE] == 0)
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group

    def warn() -> tf.Operation:
        return tf.print(
            "WARNING: tf_dgc: the gradient of replica", replica, "at iteration",
            iteration, "is left out, as it holds NaN or Inf; or, where it makes the "
            "residual overflow, only there. Further ones are counted in "
            "`optimizer.stats.nonfinite` and not reported.",
            output_stream=sys.stderr,
        )  # fmt: skip

    tf.cond(first, lambda: tf.group(warn()), tf.no_op)


def read_stats(counters: keras.Variable | None, exchange: str) -> CompressionStats:
    """Return the counters' values (zeros before the optimizer is built).

    Args:
        counters: variable from `make_counters`; None if there is none.
        exchange: name of the exchange.
    """
    values = [0] * len(_FIELDS) if counters is None else counters.numpy()
    counted: dict[str, Any] = dict(zip(_FIELDS, map(int, values), strict=True))
    return CompressionStats(**counted, exchange=exchange)


def _ratio(dense: int, sent: int) -> float:
    return dense / sent if sent else float("nan")


# --- Staleness: for how many steps an entry has waited since it was last sent.


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

    def __init__(self, tensors: Sequence[TensorSpec]):
        # As floats, which GPUs can scatter to; exact up to 2**24 steps.
        self._steps = _per_worker([], "staleness_steps")
        self._last = {
            i: _per_worker([t.size], f"{t.label.replace('/', '_')}_last_sent")
            for i, t in enumerate(tensors)
            if not t.uncompressed
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
