"""Recording: what the record of a run gains while `fit` goes on."""

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import keras
import tensorflow as tf

from tf_dgc import _versions, schedules
from tf_dgc.codecs import buffer
from tf_dgc.codecs.buffer import HEADER_WORDS
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import Compressor, TopK
from tf_dgc.local.optimizer import LocalOptimizer
from tf_dgc.optimizers import state
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.reports import record
from tf_dgc.reports.record import EpochRecord, RunRecord, VariableRecord
from tf_dgc.steps import plan as plans

# --- Sizes: what a worker sends of each variable.


class VariableSize(NamedTuple):
    """What is sent of a variable in one step, or one exchange of local steps.

    Attributes:
        tensor: tensor of the variable.
        dense_bytes: number of bytes of its whole gradient.
        sent_bytes: number of bytes that a worker hands to the collectives, without what
            a message has once; None if that is known only while it runs.
    """

    tensor: TensorSpec
    dense_bytes: int
    sent_bytes: int | None


def sizes_per_variable(
    optimizer: CompressedOptimizer | LocalOptimizer,
) -> list[VariableSize]:
    """Return the sizes of all variables in the last step; none before it is built."""
    made = optimizer.state
    if made is None:
        return []
    compressor = made.tuned.compressor
    dense = [t.size * (t.narrow or t.dtype).size for t in made.tensors]
    if type(compressor) is TopK:
        last = max(0, int(optimizer.iterations) - 1)
        sent = _by_top_k(compressor, made.tensors, last, optimizer.num_workers)
    else:
        sent = _by_method(compressor, made.tensors)
    return list(map(VariableSize, made.tensors, dense, sent))


def _by_top_k(
    compressor: TopK, tensors: list[TensorSpec], iteration: int, num_workers: int
) -> list[int | None]:
    sparsity = compressor.sparsity
    if callable(sparsity):
        sparsity = float(
            schedules.schedule_value(sparsity, tf.constant(iteration, tf.int64))
        )
    found: dict[int, int | None] = {}
    for places in plans.split_uncompressed(tensors, num_workers):
        layout = [
            tensors[i]._replace(value_dtype=compressor.value_dtype) for i in places
        ]
        sent = plans.plan_step(layout, sparsity, num_workers)
        for i, tensor, count in zip(places, layout, sent.counts, strict=True):
            words = cast(int, buffer.sparse_words([tensor], [count])) - HEADER_WORDS
            found[i] = tensor.size * sent.summed_dtype.size if sent.dense else 4 * words
    return [found[i] for i in range(len(tensors))]


def _by_method(compressor: Compressor, tensors: list[TensorSpec]) -> list[int | None]:
    uncompressed = [t.size * t.dtype.size for t in tensors]
    if not compressor.together:
        return [
            whole if t.uncompressed else compressor.bytes(t.shape, t.dtype)
            for t, whole in zip(tensors, uncompressed, strict=True)
        ]
    others = [t for t in tensors if not t.uncompressed]
    size = sum(t.size for t in others)
    # Of all together a method says one number: in equal shares of an entry.
    total = compressor.bytes((size,), others[0].dtype) if others else 0
    return [
        whole if t.uncompressed else total and round(total * t.size / size)
        for t, whole in zip(tensors, uncompressed, strict=True)
    ]


class _Counted(NamedTuple):
    """What optimizers counted so far, and when that was."""

    steps: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: "_Counted") -> "_Counted":
        return _Counted(
            self.steps + other.steps,
            self.sent_bytes + other.sent_bytes,
            self.dense_bytes + other.dense_bytes,
            self.seconds + other.seconds,
        )

    def less(self, other: "_Counted") -> "_Counted":
        negative = -other.steps, -other.sent_bytes, -other.dense_bytes
        return self.plus(_Counted(*negative, -other.seconds))


class Recorder:
    """Writes a record after every epoch, and goes on where an earlier run ended.

    Epochs of a record that is there stay if `fit` begins with a later one, as it does
    with `BackupAndRestore` or `initial_epoch=`; else the record begins anew.

    Args:
        path: path of the record.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = path
        self._epochs: list[EpochRecord] | None = None
        self._offset = _Counted()

    def begin_fit(self) -> None:
        """Forget what was recorded by an earlier `fit`."""
        self._epochs = None

    def begin_epoch(self, epoch: int, optimizers: Mapping[str, Any]) -> None:
        """Begin an epoch: at the first, keep what a record has of earlier ones.

        Args:
            epoch: number of the epoch.
            optimizers: optimizers by name.
        """
        if self._epochs is not None:
            return
        self._epochs = self._read(epoch)
        now = _count(optimizers)
        last = self._epochs[-1] if self._epochs else EpochRecord(-1, {})
        counted = last.steps or 0, last.sent_bytes or 0, last.dense_bytes or 0
        then = _Counted(*counted, last.seconds or 0.0)
        self._offset = then.less(now)
        if then.steps and now.steps >= then.steps:
            # Counters that were restored go on by themselves.
            self._offset = _Counted(seconds=self._offset.seconds)

    def _read(self, epoch: int) -> list[EpochRecord]:
        if epoch == 0 or not os.path.exists(self._path):
            return []
        return [e for e in record.read_record(self._path).epochs if e.epoch < epoch]

    def end_epoch(
        self,
        epoch: int,
        logs: Mapping[str, Any],
        model: keras.Model,
        optimizers: Mapping[str, Any],
    ) -> None:
        """Write the record with one more epoch.

        Args:
            epoch: number of the epoch.
            logs: logs of it.
            model: model that is trained.
            optimizers: optimizers by name.

        Raises:
            OSError: if it cannot be written.
        """
        counted = self._offset.plus(_count(optimizers))
        ended = EpochRecord(epoch, record.finite_or_none(dict(logs)), *counted)
        self._epochs = [*(self._epochs or []), ended]
        record.write_record(_run(model, optimizers, self._epochs), self._path)


def _count(optimizers: Mapping[str, Any]) -> _Counted:
    stats = [optimizer.stats for optimizer in optimizers.values()]
    return _Counted(
        max(int(optimizer.iterations) for optimizer in optimizers.values()),
        sum(s.bytes for s in stats),
        sum(s.dense_bytes for s in stats),
        time.monotonic(),
    )


def _run(
    model: keras.Model, optimizers: Mapping[str, Any], epochs: list[EpochRecord]
) -> RunRecord:
    return RunRecord(
        model=model.name,
        workers=max(optimizer.num_workers for optimizer in optimizers.values()),
        versions={
            "tf_dgc": _versions.tf_dgc_version(),
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "Python": _versions.python_version(),
        },
        methods={name: _method(o) for name, o in optimizers.items()},
        variables=[
            VariableRecord(
                size.tensor.label,
                name,
                size.tensor.shape,
                size.dense_bytes,
                size.sent_bytes,
            )
            for name, optimizer in optimizers.items()
            for size in sizes_per_variable(optimizer)
        ],
        epochs=epochs,
    )


def _method(optimizer: CompressedOptimizer | LocalOptimizer) -> dict[str, Any]:
    settings = state.without_identities(optimizer.describe_config())
    name = f"{type(optimizer).__name__}, {optimizer.compressor.name}"
    if isinstance(optimizer, LocalOptimizer):
        name += f", every {optimizer.period} steps"
    return {"name": name, "exchange": optimizer.stats.exchange, "settings": settings}
