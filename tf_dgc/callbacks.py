"""Keras callbacks."""

import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import keras

from tf_dgc.arguments import show
from tf_dgc.local.optimizer import LocalOptimizer
from tf_dgc.multiworker import consensus
from tf_dgc.multiworker.callbacks import BackupAndRestore, ModelCheckpoint
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.reports.recorder import Recorder

# --- Hints: where compressing does not pay, and what to do there.


def compression_hint(optimizer: CompressedOptimizer) -> str | None:
    """Return why compressing does not pay here, and what to do; None if it may.

    Args:
        optimizer: optimizer before its first step, or after one.
    """
    if optimizer.compressor.lossless:
        return None  # nobody asked for less
    if optimizer.num_workers == 1:
        return (
            "there is one worker, which sends nothing, so compressing costs time and "
            "accuracy for nothing. Start several workers, for example by `tf-dgc run "
            "--workers 2 SCRIPT`, or train by the inner optimizer alone"
        )
    stats = optimizer.stats
    if not stats.steps or stats.ratio >= 1 or _was_dense(optimizer):
        return None
    sent = (
        f"a step sends {stats.bytes_per_step} bytes, and without compression it would "
        f"be {stats.dense_bytes_per_step}"
    )
    if optimizer.num_compressed:
        return f"{sent}. Send fewer entries, or {_INNER_ALONE}"
    return (
        f"{sent}: all variables are exempt, being of rank below 2 or of fewer than "
        f"`min_compress_size={optimizer.min_compress_size}` entries. {_SMALLER}, or "
        f"{_INNER_ALONE}"
    )


_INNER_ALONE = "train by the inner optimizer alone, after `tf_dgc.prepare(strategy)`"
_SMALLER = "Pass a smaller `min_compress_size`"


def _was_dense(optimizer: CompressedOptimizer) -> bool:
    """Whether a schedule made the last step a dense one."""
    everything = optimizer.stats.entries_per_step == optimizer.num_entries
    sparsifies = optimizer.compressor.kind == "sparsification"
    return bool(optimizer.num_compressed) and sparsifies and everything


__all__ = [
    "BackupAndRestore",
    "CompressionMonitor",
    "ModelCheckpoint",
    "find_compressed_optimizer",
]

Monitored: TypeAlias = CompressedOptimizer | LocalOptimizer


class CompressionMonitor(keras.callbacks.Callback):
    """Adds what was sent to the logs of every epoch.

    The logs gain `bytes_per_step`, `dense_bytes_per_step`, `entries_per_step` (of the
    last step), `compression_ratio` (of the last step), `total_compression_ratio`
    (since the start, warm-up included), `total_bytes`, `iterations` (of the optimizer)
    and `nonfinite_gradients`. Callbacks further
    down the list see them: put `CompressionMonitor` before `TensorBoard` and
    `CSVLogger`; `History` always has them.

    With `track_staleness=True` of the optimizer also `staleness_mean`, `staleness_p99`
    and `staleness_max`: the steps since entries were last sent, on this worker. These
    differ between workers, so nothing that all must decide alike (such as
    `EarlyStopping`) may depend on them.

    Of a `LocalOptimizer` a step is an exchange, and the logs gain `rounds`, and
    `skipped_steps` of this worker; with `track_drift=True` also `drift`, the largest
    distance of any worker's weights from the mean of all as the last round ended.

    Where compressing does not pay (one worker, or more bytes than without), one warning
    says so, and what to do.

    Args:
        optimizer: a `CompressedOptimizer` or `LocalOptimizer`, for a model that holds
            it elsewhere than in `model.optimizer`; or several, as a dictionary by name
            or as a list, whose names are those of the optimizers. Of several, every log
            is preceded by the name, as in `generator_bytes_per_step`. None for the
            model's.
        path: path of a file that the first worker writes after every epoch, for
            `tf-dgc report`: settings, logs, bytes and seconds. It is complete or not
            there. If `fit` begins with a later epoch than the first, it goes on.

    Raises:
        ValueError: for anything else, and for two optimizers of one name; when training
            begins, if the model's optimizer is neither; as it goes on, if the file is
            no such record.

    Example:
        >>> model.fit(x, y, callbacks=[CompressionMonitor(), TensorBoard("logs")])
        >>> model.fit(x, y, callbacks=[CompressionMonitor(path="run.json")])
        >>> both = {"generator": gan.g_optimizer, "discriminator": gan.d_optimizer}
        >>> gan.fit(x, callbacks=[CompressionMonitor(optimizer=both)])
    """

    def __init__(self, optimizer: Any = None, path: str | os.PathLike | None = None):
        super().__init__()
        self._given = None if optimizer is None else _by_prefix(optimizer)
        self._hinted = False
        self._recorder = None if path is None else Recorder(_checked(path))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizers."""
        self._hint()
        if self._recorder:
            self._recorder.begin_fit()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Read what was recorded before, at the first epoch."""
        if self._recorder and self._is_chief():
            self._recorder.begin_epoch(epoch, self._by_name())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the counters to the logs, and write the record."""
        self._hint()
        logs = {} if logs is None else logs
        for prefix, optimizer in self._optimizers().items():
            logs.update({prefix + key: value for key, value in _logs(optimizer)})
        if self._recorder and self._is_chief():
            try:
                self._recorder.end_epoch(epoch, logs, self.model, self._by_name())
            except OSError as error:  # no reason to end what has taken long
                warnings.warn(f"tf_dgc: no record was written: {error}", stacklevel=2)

    def _is_chief(self) -> bool:
        return consensus.is_chief(self.model.distribute_strategy)

    def _by_name(self) -> dict[str, Monitored]:
        return {prefix[:-1]: o for prefix, o in self._optimizers().items()}

    def _optimizers(self) -> dict[str, Monitored]:
        if self._given is not None:
            return self._given
        return _by_prefix(getattr(self.model, "optimizer", None))

    def _hint(self) -> None:
        some = self._optimizers().values()
        every_step = [o for o in some if isinstance(o, CompressedOptimizer)]
        found = map(compression_hint, every_step)
        text = next(filter(None, found), None)
        if text and not self._hinted:
            self._hinted = True
            warnings.warn(f"tf_dgc: {text}.", stacklevel=2)


def _checked(path: Any) -> str | os.PathLike:
    if isinstance(path, str | os.PathLike) and os.fspath(path):
        return path
    raise ValueError(
        "`path` must be the path of the file that is to be written, or None. "
        f"Received: path={show(path)}"
    )


def _by_prefix(optimizer: Any) -> dict[str, Monitored]:
    """Return optimizers by what their logs begin with."""
    if isinstance(optimizer, dict):
        return {f"{n}_": find_compressed_optimizer(o) for n, o in optimizer.items()}
    if not isinstance(optimizer, Iterable):
        return {"": find_compressed_optimizer(optimizer)}
    optimizer = list(optimizer)
    found = {f"{o.name}_": o for o in map(find_compressed_optimizer, optimizer)}
    if len(found) < len(optimizer):
        raise ValueError(
            "Optimizers of one name cannot be told apart in the logs. Pass a "
            "dictionary of optimizers by name, or make them with names of their own "
            "(`name=`). "
            f"Received: optimizers named {[o.name for o in optimizer]}"
        )
    return found


def _logs(optimizer: Monitored) -> Iterator[tuple[str, float]]:
    stats = optimizer.stats
    yield "bytes_per_step", stats.bytes_per_step
    yield "dense_bytes_per_step", stats.dense_bytes_per_step
    yield "entries_per_step", stats.entries_per_step
    yield "compression_ratio", stats.ratio
    yield "total_compression_ratio", stats.total_ratio
    yield "total_bytes", stats.bytes
    yield "iterations", int(optimizer.iterations)
    yield "nonfinite_gradients", stats.nonfinite
    if isinstance(optimizer, LocalOptimizer):
        yield "rounds", stats.steps
        yield "skipped_steps", optimizer.skipped
        if optimizer.drift is not None:
            yield "drift", optimizer.drift
        return
    staleness = optimizer.staleness
    if staleness is not None:
        yield "staleness_mean", staleness.mean
        yield "staleness_p99", staleness.p99
        yield "staleness_max", staleness.max


def find_compressed_optimizer(optimizer: Any) -> Monitored:
    """Return the optimizer of the package that this is, or that loss scaling wraps.

    A `CompressedOptimizer` or a `LocalOptimizer`.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, CompressedOptimizer | LocalOptimizer):
        return optimizer
    raise ValueError(
        "The model's optimizer must be a `tf_dgc.CompressedOptimizer`, such as "
        "`tf_dgc.DGCOptimizer`, or a `tf_dgc.LocalOptimizer`. If the model holds it "
        "elsewhere, or several, pass `CompressionMonitor(optimizer=...)`. "
        f"Received: optimizer={show(optimizer)}"
    )
