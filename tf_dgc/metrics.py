"""Counters of what a worker sends."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import tracing


@dataclasses.dataclass(frozen=True)
class CompressionStats:
    """What one worker sent. Equal on all workers.

    Attributes:
        steps: number of optimizer steps that were counted.
        entries: number of gradient entries sent, in total.
        bytes: number of bytes passed to the collectives, in total.
        dense_bytes: number of bytes that dense all-reduces would take, in total.
        nonfinite: number of gradients, over all workers, that were dropped because
            they held NaN or Inf, or made the residual overflow. With overlapping steps,
            the largest number of any bucket; with gossip, those of a worker and its
            neighbors.
        entries_per_step: number of entries sent in the last step.
        bytes_per_step: number of bytes passed to the collectives in the last step.
        dense_bytes_per_step: number of bytes of a dense all-reduce in the last step.
        collective: name of the collective algorithm; with "auto" the chosen one,
            preceded by "float16, " if gradients are sent as float16 without further
            compression, and with the number of buckets of overlapping steps.
    """

    steps: int
    entries: int
    bytes: int
    dense_bytes: int
    nonfinite: int
    entries_per_step: int
    bytes_per_step: int
    dense_bytes_per_step: int
    collective: str = "ring"

    @property
    def ratio(self) -> float:
        """Dense bytes divided by sent bytes, in the last step; NaN before the first."""
        return quotient(self.dense_bytes_per_step, self.bytes_per_step)

    @property
    def total_ratio(self) -> float:
        """Dense bytes divided by sent bytes since the start, warm-up included."""
        return quotient(self.dense_bytes, self.bytes)


def quotient(amount: int, divisor: int) -> float:
    """Return a quotient, NaN if nothing was counted."""
    return amount / divisor if divisor else float("nan")


NOTHING_SENT = CompressionStats(0, 0, 0, 0, 0, 0, 0, 0)


_COUNTERS = [f.name for f in dataclasses.fields(CompressionStats) if f.type is int]
_NONFINITE = _COUNTERS.index("nonfinite")


def create_counters() -> keras.Variable:
    """Return the variable that holds `CompressionStats`, equal on all workers."""
    return create_count("compression_counters", [len(_COUNTERS)])


def create_count(name: str, shape: Sequence[int] = ()) -> keras.Variable:
    """Return an int64 variable of zeros for counts that are equal on all workers."""
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
    nonfinite: int | tf.Tensor,
) -> None:
    """Add one step to the counters.

    Args:
        counters: variable from `create_counters`.
        entries: number of entries sent in this step, an int or integer scalar.
        sent_bytes: number of bytes passed to the collectives, likewise.
        dense_bytes: number of bytes that a dense all-reduce would take.
        nonfinite: number of workers whose gradient was dropped, an int or integer
            scalar.
    """
    step = tf.stack(
        [tf.cast(x, tf.int64) for x in (1, entries, sent_bytes, dense_bytes, nonfinite)]
    )
    totals = tf.convert_to_tensor(counters.value)[:5] + step
    counters.assign(tf.concat([totals, step[1:4]], axis=0))


def read_stats(counters: keras.Variable | None, collective: str) -> CompressionStats:
    """Return the counters' values; zeros if the optimizer is not built (None)."""
    values = [0] * len(_COUNTERS) if counters is None else counters.numpy()
    counts: dict[str, Any] = dict(zip(_COUNTERS, map(int, values), strict=True))
    return CompressionStats(**counts, collective=collective)


def dense_bytes(variables: Sequence[keras.Variable]) -> int:
    """Return the size of the variables' gradients in a dense all-reduce."""
    return sum(v.shape.num_elements() * tf.as_dtype(v.dtype).size for v in variables)


def warn_once_if_nonfinite(
    counters: keras.Variable, finite: tf.Tensor, iteration: tf.Tensor
) -> None:
    """Print a warning when this worker's gradient is dropped for the first time.

    Args:
        counters: variable from `create_counters`, before this step is counted.
        finite: scalar bool, whether this worker's gradient was finite.
        iteration: number of the step, an integer scalar.
    """
    if tracing.in_xla_context():
        return  # XLA cannot print; `stats.nonfinite` still counts
    first = tf.logical_and(tf.logical_not(finite), counters.value[_NONFINITE] == 0)
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group

    def warn() -> tf.Operation:
        return tf.print(
            "WARNING: tf_dgc: the gradient of replica", replica, "at iteration",
            iteration, "is dropped, as it holds NaN or Inf; if only the residual "
            "overflows, only those entries are dropped. Further ones are counted in "
            "`optimizer.stats.nonfinite` and not reported.",
            output_stream=sys.stderr,
        )  # fmt: skip

    tf.cond(first, lambda: tf.group(warn()), tf.no_op)
