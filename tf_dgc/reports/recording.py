"""Recording: what the record of a run gains while `fit` goes on."""

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc import _versions
from tf_dgc.local.optimizer import LocalOptimizer
from tf_dgc.optimizers import tensors
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.reports import record, sizes
from tf_dgc.reports.record import Epoch, Run, Variable


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
        self._epochs: list[Epoch] | None = None
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
        last = self._epochs[-1] if self._epochs else Epoch(-1, {})
        counted = last.steps or 0, last.sent_bytes or 0, last.dense_bytes or 0
        then = _Counted(*counted, last.seconds or 0.0)
        self._offset = then.less(now)
        if then.steps and now.steps >= then.steps:
            # Counters that were restored go on by themselves.
            self._offset = _Counted(seconds=self._offset.seconds)

    def _read(self, epoch: int) -> list[Epoch]:
        if epoch == 0 or not os.path.exists(self._path):
            return []
        return [e for e in record.read(self._path).epochs if e.epoch < epoch]

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
        ended = Epoch(epoch, record.finite(dict(logs)), *counted)
        self._epochs = [*(self._epochs or []), ended]
        record.write(_run(model, optimizers, self._epochs), self._path)


def _count(optimizers: Mapping[str, Any]) -> _Counted:
    stats = [optimizer.stats for optimizer in optimizers.values()]
    return _Counted(
        max(int(optimizer.iterations) for optimizer in optimizers.values()),
        sum(s.bytes for s in stats),
        sum(s.dense_bytes for s in stats),
        time.monotonic(),
    )


def _run(model: keras.Model, optimizers: Mapping[str, Any], epochs: list[Epoch]) -> Run:
    return Run(
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
            Variable(
                size.tensor.label,
                name,
                size.tensor.shape,
                size.dense_bytes,
                size.sent_bytes,
            )
            for name, optimizer in optimizers.items()
            for size in sizes.of_each(optimizer)
        ],
        epochs=epochs,
    )


def _method(optimizer: CompressedOptimizer | LocalOptimizer) -> dict[str, Any]:
    settings = tensors.without_identities(optimizer.describe_config())
    name = f"{type(optimizer).__name__}, {optimizer.compressor.name}"
    if isinstance(optimizer, LocalOptimizer):
        name += f", every {optimizer.period} steps"
    return {"name": name, "exchange": optimizer.stats.exchange, "settings": settings}
