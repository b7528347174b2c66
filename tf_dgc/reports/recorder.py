"""Writes the record of a run during `fit`."""

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
from tf_dgc.compressors.topk import is_top_k
from tf_dgc.local.optimizer import LocalOptimizer
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.optimizers.state import without_identities
from tf_dgc.reports import record
from tf_dgc.reports.record import EpochRecord, RunRecord, VariableRecord
from tf_dgc.steps.base import plan_step, split_uncompressed


class Recorder:
    """Writes a record after every epoch, and continues the record of an earlier run."""

    def __init__(self, path: str | os.PathLike):
        self._path = path
        self._epochs: list[EpochRecord] | None = None
        self._offset = _Totals()

    def begin_fit(self) -> None:
        """Begin a new `fit`."""
        self._epochs = None

    def begin_epoch(self, epoch: int, optimizers: Mapping[str, Any]) -> None:
        """Begin an epoch; at the first of a `fit`, read the record of earlier ones."""
        if self._epochs is not None:
            return
        self._epochs = self._read(epoch)
        current = _read_totals(optimizers)
        last = self._epochs[-1] if self._epochs else EpochRecord(-1, {})
        recorded = _Totals(
            last.steps or 0,
            last.sent_bytes or 0,
            last.dense_bytes or 0,
            last.seconds or 0.0,
        )
        self._offset = recorded.minus(current)
        if recorded.steps and current.steps >= recorded.steps:
            # Restored counters already include the recorded epochs.
            self._offset = _Totals(seconds=self._offset.seconds)

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
        """Write the record with another epoch."""
        totals = self._offset.plus(_read_totals(optimizers))
        new = EpochRecord(epoch, record.finite_or_none(dict(logs)), *totals)
        self._epochs = [*(self._epochs or []), new]
        record.write_record(_run(model, optimizers, self._epochs), self._path)


class _Totals(NamedTuple):
    steps: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: "_Totals") -> "_Totals":
        return _Totals(
            self.steps + other.steps,
            self.sent_bytes + other.sent_bytes,
            self.dense_bytes + other.dense_bytes,
            self.seconds + other.seconds,
        )

    def minus(self, other: "_Totals") -> "_Totals":
        return _Totals(
            self.steps - other.steps,
            self.sent_bytes - other.sent_bytes,
            self.dense_bytes - other.dense_bytes,
            self.seconds - other.seconds,
        )


def _read_totals(optimizers: Mapping[str, Any]) -> _Totals:
    stats = [optimizer.stats for optimizer in optimizers.values()]
    return _Totals(
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
    settings = without_identities(optimizer.describe_config())
    name = f"{type(optimizer).__name__}, {optimizer.compressor.name}"
    if isinstance(optimizer, LocalOptimizer):
        name += f", every {optimizer.period} steps"
    return {
        "name": name,
        "collective": optimizer.stats.collective,
        "settings": settings,
    }


class VariableSize(NamedTuple):
    """Size of a variable in one step, or in one exchange of local steps."""

    tensor: TensorSpec
    dense_bytes: int
    sent_bytes: int | None  # without header; None: run time


def sizes_per_variable(
    optimizer: CompressedOptimizer | LocalOptimizer,
) -> list[VariableSize]:
    """Return the sizes of all variables in the last step; none before `build`."""
    state = getattr(optimizer, "state", None)  # `ServerOptimizer` has none
    if state is None:
        return []
    compressor, tensors = state.tuned.compressor, state.tensors
    dense = [t.size * (t.narrow_dtype or t.dtype).size for t in tensors]
    if is_top_k(compressor):
        iteration = max(0, int(optimizer.iterations) - 1)
        sent = _top_k_bytes(compressor, tensors, iteration, optimizer.num_workers)
    else:
        sent = _method_bytes(compressor, tensors)
    return list(map(VariableSize, tensors, dense, sent))


def _top_k_bytes(
    compressor: TopK, tensors: list[TensorSpec], iteration: int, num_workers: int
) -> list[int | None]:
    sparsity = compressor.sparsity
    if callable(sparsity):
        sparsity = float(
            schedules.schedule_value(sparsity, tf.constant(iteration, tf.int64))
        )
    sent_bytes: dict[int, int | None] = {}
    for places in split_uncompressed(tensors, num_workers):
        layout = [
            tensors[i]._replace(value_dtype=compressor.value_dtype) for i in places
        ]
        plan = plan_step(layout, sparsity, num_workers)
        for i, tensor, count in zip(places, layout, plan.counts, strict=True):
            words = cast(int, buffer.sparse_words([tensor], [count])) - HEADER_WORDS
            dense_bytes = tensor.size * plan.summed_dtype.size
            sent_bytes[i] = dense_bytes if plan.dense else 4 * words
    return [sent_bytes[i] for i in range(len(tensors))]


def _method_bytes(
    compressor: Compressor, tensors: list[TensorSpec]
) -> list[int | None]:
    compressed = [t for t in tensors if not t.uncompressed]
    size = sum(t.size for t in compressed)
    total: int | None = 0
    if compressor.entire_model and compressed:
        total = compressor.bytes((size,), compressed[0].dtype)

    def sent_bytes(tensor: TensorSpec) -> int | None:
        if tensor.uncompressed:
            return tensor.size * tensor.dtype.size
        if not compressor.entire_model:
            return compressor.bytes(tensor.shape, tensor.dtype)
        return total and round(total * tensor.size / size)  # in proportion to entries

    return list(map(sent_bytes, tensors))
