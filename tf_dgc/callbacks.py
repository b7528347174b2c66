"""Keras callbacks."""

from typing import Any

import keras

from tf_dgc.optimizer import CompressedOptimizer
from tf_dgc.resuming import BackupAndRestore, ModelCheckpoint

__all__ = [
    "BackupAndRestore",
    "CompressionMonitor",
    "ModelCheckpoint",
    "find_compressed_optimizer",
]


class CompressionMonitor(keras.callbacks.Callback):
    """Adds what was sent to the logs of every epoch.

    The logs gain `bytes_per_step`, `dense_bytes_per_step`, `entries_per_step` (of the
    last step), `compression_ratio` (of the last step), `total_compression_ratio`
    (since the start, warm-up included) and `nonfinite_gradients`. Callbacks further
    down the list see them: put `CompressionMonitor` before `TensorBoard` and
    `CSVLogger`; `History` always has them.

    With `track_staleness=True` of the optimizer also `staleness_mean`, `staleness_p99`
    and `staleness_max`: the steps since entries were last sent, on this worker. These
    differ between workers, so nothing that all must decide alike (such as
    `EarlyStopping`) may depend on them.

    Raises:
        ValueError: when training begins, if the model's optimizer is not a
            `CompressedOptimizer`.

    Example:
        >>> model.fit(x, y, callbacks=[CompressionMonitor(), TensorBoard("logs")])
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizer."""
        find_compressed_optimizer(self.model.optimizer)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the counters to the logs."""
        optimizer = find_compressed_optimizer(self.model.optimizer)
        stats, staleness = optimizer.stats, optimizer.staleness
        if logs is None:
            return
        logs["bytes_per_step"] = stats.bytes_per_step
        logs["dense_bytes_per_step"] = stats.dense_bytes_per_step
        logs["entries_per_step"] = stats.entries_per_step
        logs["compression_ratio"] = stats.ratio
        logs["total_compression_ratio"] = stats.total_ratio
        logs["nonfinite_gradients"] = stats.nonfinite
        if staleness is not None:
            logs["staleness_mean"] = staleness.mean
            logs["staleness_p99"] = staleness.p99
            logs["staleness_max"] = staleness.max


def find_compressed_optimizer(optimizer: Any) -> CompressedOptimizer:
    """Return the `CompressedOptimizer` that `optimizer` is, or that loss scaling wraps.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, CompressedOptimizer):
        return optimizer
    raise ValueError(
        "The model's optimizer must be a `tf_dgc.CompressedOptimizer`, such as "
        "`tf_dgc.DGCOptimizer`. "
        f"Received: optimizer={optimizer!r}"
    )
