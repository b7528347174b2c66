"""Keras callbacks: log what was sent, save and restore on several workers."""

import os
import warnings
from collections.abc import Iterable
from typing import Any, TypeAlias

import keras

from tf_dgc._internals import keras_trainer
from tf_dgc.arguments import show
from tf_dgc.compressors import NoCompression, Sparsifier
from tf_dgc.local.optimizer import LocalOptimizer
from tf_dgc.metrics import NOTHING_SENT, CompressionStats, quotient
from tf_dgc.multiworker import consensus
from tf_dgc.multiworker.callbacks import BackupAndRestore, ModelCheckpoint
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.reports.recorder import Recorder
from tf_dgc.server.optimizer import ServerOptimizer

__all__ = [
    "BackupAndRestore",
    "CompressionMonitor",
    "ModelCheckpoint",
    "find_compressed_optimizer",
]

_SHOWN = ("compression_ratio", "bytes_per_step")  # in the progress line

MonitoredOptimizer: TypeAlias = CompressedOptimizer | LocalOptimizer | ServerOptimizer


class CompressionMonitor(keras.callbacks.Callback):
    """Adds communication statistics to the logs of every epoch.

    Keras's progress line shows two: `compression_ratio`, the dense bytes of the epoch
    divided by the sent bytes, and `bytes_per_step`, the mean of the epoch. They are NaN
    if the epoch sent nothing.

    `History`, the record (`path`) and callbacks further down the list, such as
    `TensorBoard` and `CSVLogger`, also get `dense_bytes_per_step` and
    `entries_per_step` of the epoch, `total_compression_ratio` and `total_bytes` since
    the start, warm-up included, `iterations` of the optimizer, and
    `nonfinite_gradients`. Put `CompressionMonitor` before callbacks that write logs.
    On several workers, give all the same callbacks: of Keras's `TensorBoard` and
    `CSVLogger` with one path for all, the first worker's writes. Workers of a
    `ServerOptimizer` need a path each. `TensorBoard` needs the package tensorboard:
    `pip install 'tf_dgc[report]'`.

    With `Diagnostics(track_staleness=True)`, the logs also gain `staleness_mean`,
    `staleness_p99` and `staleness_max`: the steps since entries were last sent, on this
    worker. They differ between workers, so don't base decisions on them that all
    workers must make alike (such as those of `EarlyStopping`).

    With a `LocalOptimizer`, `_per_step` counts a round, and the logs also gain `rounds`
    and `skipped_steps` of this worker; with
    `Diagnostics(track_consensus_distance=True)` also `consensus_distance`, the largest
    distance of any worker's weights from the mean at the end of the last round.

    With a `ServerOptimizer`, sent bytes are those that this worker pushed, and the logs
    also gain `bytes_per_pull`.

    Warns once if compression does not pay (one worker, or more bytes than without), and
    says what to do.

    Args:
        optimizer: an optimizer of this package that is not `model.optimizer`; or
            several, as a dictionary by name, or as a list, whose names are those of the
            optimizers. With several, the name precedes every key, as in
            `generator_bytes_per_step`. None for the model's.
        path: path of a file that the first worker writes after every epoch, for
            `tf-dgc report`: settings, logs, bytes and seconds. It is replaced
            atomically. If `fit` begins with a later epoch than the first, the file is
            continued.

    Raises:
        ValueError: for other arguments, and for two optimizers of one name; when
            training begins, if the model's optimizer is none of this package; and when
            an epoch begins, if the file is no such record.

    Example:
        >>> model.fit(x, y, callbacks=[CompressionMonitor(), TensorBoard("logs")])
        >>> model.fit(x, y, callbacks=[CompressionMonitor(path="run.json")])
        >>> both = {"generator": gan.g_optimizer, "discriminator": gan.d_optimizer}
        >>> gan.fit(x, callbacks=[CompressionMonitor(optimizer=both)])
    """

    def __init__(self, optimizer: Any = None, path: str | os.PathLike | None = None):
        super().__init__()
        self._passed = None if optimizer is None else _optimizers_by_prefix(optimizer)
        self._warned = False
        self._stats_at_begin: dict[str, CompressionStats] = {}  # of this epoch
        self._recorder: Recorder | None = None
        if path is not None:
            if not isinstance(path, str | os.PathLike) or not os.fspath(path):
                raise ValueError(
                    "`path` must be the path of the file to write, or None. "
                    f"Received: path={show(path)}"
                )
            self._recorder = Recorder(path)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizers."""
        self._warn_if_useless()
        if self._recorder:
            self._recorder.begin_fit()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note what was sent before; at the first epoch, read the record."""
        optimizers = self._optimizers()
        self._stats_at_begin = {prefix: o.stats for prefix, o in optimizers.items()}
        if self._recorder and self._is_chief():
            self._recorder.begin_epoch(epoch, self._optimizers_by_name())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the statistics to the logs, and write the record."""
        self._warn_if_useless()
        logs = {} if logs is None else logs
        hidden = []
        for prefix, optimizer in self._optimizers().items():
            earlier = self._stats_at_begin.get(prefix, NOTHING_SENT)
            for key, value in _statistics(optimizer, earlier).items():
                logs[prefix + key] = value
                if key not in _SHOWN:
                    hidden.append(prefix + key)
        keras_trainer.hide_from_progress_line(self.model, logs, hidden)
        if self._recorder and self._is_chief():
            by_name = self._optimizers_by_name()
            try:
                self._recorder.end_epoch(epoch, logs, self.model, by_name)
            except OSError as error:  # a full disk must not end the training
                warnings.warn(f"tf_dgc: no record was written: {error}", stacklevel=2)

    def _is_chief(self) -> bool:
        optimizers = self._optimizers().values()
        servers = [o for o in optimizers if isinstance(o, ServerOptimizer)]
        if servers:  # its workers have no strategy
            return all(optimizer.is_chief for optimizer in servers)
        return consensus.is_chief(self.model.distribute_strategy)

    def _optimizers(self) -> dict[str, MonitoredOptimizer]:
        if self._passed is not None:
            return self._passed
        return _optimizers_by_prefix(getattr(self.model, "optimizer", None))

    def _optimizers_by_name(self) -> dict[str, MonitoredOptimizer]:
        return {prefix[:-1]: o for prefix, o in self._optimizers().items()}

    def _warn_if_useless(self) -> None:
        for optimizer in self._optimizers().values():
            if self._warned or not isinstance(optimizer, CompressedOptimizer):
                continue
            hint = compression_hint(optimizer)
            if hint:
                self._warned = True
                warnings.warn(f"tf_dgc: {hint}.", stacklevel=2)


def find_compressed_optimizer(optimizer: Any) -> MonitoredOptimizer:
    """Return an optimizer of this package, also within loss scaling.

    Args:
        optimizer: the optimizer itself, or a `LossScaleOptimizer` that wraps it.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, MonitoredOptimizer):
        return optimizer
    raise ValueError(
        "The model's optimizer must be a `tf_dgc.CompressedOptimizer`, such as "
        "`tf_dgc.DGCOptimizer`, a `tf_dgc.LocalOptimizer` or a "
        "`tf_dgc.ServerOptimizer`. If the model holds it under another name, or has "
        "several, pass `CompressionMonitor(optimizer=...)`. "
        f"Received: optimizer={show(optimizer)}"
    )


def _optimizers_by_prefix(optimizer: Any) -> dict[str, MonitoredOptimizer]:
    if isinstance(optimizer, dict):
        return {f"{n}_": find_compressed_optimizer(o) for n, o in optimizer.items()}
    if not isinstance(optimizer, Iterable):
        return {"": find_compressed_optimizer(optimizer)}
    optimizers = [find_compressed_optimizer(o) for o in optimizer]
    by_prefix = {f"{o.name}_": o for o in optimizers}
    if len(by_prefix) < len(optimizers):
        raise ValueError(
            "Optimizers of one name are indistinguishable in the logs. Pass a "
            "dictionary of optimizers by name, or create them with different names "
            f"(`name=`). Received: optimizers named {[o.name for o in optimizers]}"
        )
    return by_prefix


def _statistics(
    optimizer: MonitoredOptimizer, earlier: CompressionStats
) -> dict[str, float]:
    """Return logs by name; means are over the steps since `earlier`."""
    stats = optimizer.stats
    steps = stats.steps - earlier.steps
    num_bytes = stats.bytes - earlier.bytes
    dense_bytes = stats.dense_bytes - earlier.dense_bytes
    logs: dict[str, float] = {
        "compression_ratio": quotient(dense_bytes, num_bytes),
        "bytes_per_step": quotient(num_bytes, steps),
        "dense_bytes_per_step": quotient(dense_bytes, steps),
        "entries_per_step": quotient(stats.entries - earlier.entries, steps),
        "total_compression_ratio": stats.total_ratio,
        "total_bytes": stats.bytes,
        "iterations": int(optimizer.iterations),
        "nonfinite_gradients": stats.nonfinite,
    }
    if isinstance(optimizer, LocalOptimizer):
        logs |= {"rounds": stats.steps, "skipped_steps": optimizer.skipped}
        if optimizer.consensus_distance is not None:
            logs["consensus_distance"] = optimizer.consensus_distance
    elif isinstance(optimizer, ServerOptimizer):
        logs["bytes_per_pull"] = optimizer.bytes_per_pull
    elif (staleness := optimizer.staleness) is not None:
        logs |= {
            "staleness_mean": staleness.mean,
            "staleness_p99": staleness.p99,
            "staleness_max": staleness.max,
        }
    return logs


def compression_hint(optimizer: CompressedOptimizer) -> str | None:
    """Return why compression does not pay, and what to do; None if it may pay."""
    if isinstance(optimizer.compressor, NoCompression):
        return None
    if optimizer.num_workers == 1:
        return (
            "there is one worker, which sends nothing, so compression costs time and "
            "accuracy for nothing. Start several workers, for example by `tf-dgc run "
            "--workers 2 SCRIPT`, or train with the inner optimizer alone"
        )
    stats = optimizer.stats
    if not stats.steps or stats.ratio >= 1 or _was_dense(optimizer):
        return None
    bytes_per_step = (
        f"a step sends {stats.bytes_per_step} bytes, and without compression it would "
        f"send {stats.dense_bytes_per_step}"
    )
    alternative = (
        "train with the inner optimizer alone, after `tf_dgc.prepare(strategy)`"
    )
    if optimizer.num_compressed:
        return f"{bytes_per_step}. Send fewer entries, or {alternative}"
    return (
        f"{bytes_per_step}: all variables are sent uncompressed, as their rank is "
        "below 2 or they have fewer than "
        f"`min_compress_size={optimizer.min_compress_size}` entries. Pass a smaller "
        f"`min_compress_size`, or {alternative}"
    )


def _was_dense(optimizer: CompressedOptimizer) -> bool:
    sent_all = optimizer.stats.entries_per_step == optimizer.num_entries
    sparsifies = isinstance(optimizer.compressor, Sparsifier)
    return bool(optimizer.num_compressed) and sparsifies and sent_all
