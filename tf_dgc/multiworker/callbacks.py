"""Keras's callbacks that save, for several workers."""

import json
import pathlib
from typing import Any

import keras
import numpy as np

from tf_dgc._internals import keras_trainer, save_hooks
from tf_dgc.arguments import show
from tf_dgc.multiworker import backup, consensus, saving, worker_parts
from tf_dgc.multiworker.backup import BackupFolder, Generation, TrainingPosition

_MAX_LENGTH = 1000  # of the part of an error of Keras that is quoted


class ModelCheckpoint(save_hooks.ModelCheckpointHooks):
    """`keras.callbacks.ModelCheckpoint` for several workers.

    Takes the arguments of Keras's callback and does the same, with two differences: one
    worker writes the file while all take part, and a file is replaced only when the new
    one is complete. Use it on every worker, with the same arguments.

    Raises:
        ValueError: if `filepath` does not end in `.keras`, or in `.weights.h5` with
            `save_weights_only=True`. The old `.h5` format has no place for state that
            differs between workers.
    """

    def __init__(self, filepath: saving.Path, *args: Any, **kwargs: Any):
        super().__init__(filepath, *args, **kwargs)
        self.check_filepath()

    def check_filepath(self) -> None:
        """Raise `ValueError` for an ending that is not supported."""
        if is_old_format(self):
            raise ValueError(
                "`filepath` must end in `.keras`, or in `.weights.h5` with "
                f"`save_weights_only=True`. Received: filepath={show(self.filepath)}"
            )

    def logs_of_all(self, logs: dict[str, Any] | None) -> dict[str, Any]:
        """Return the first worker's logs, so that all workers make the same decision.

        Within an epoch, logs differ between workers.
        """
        strategy = self.model.distribute_strategy
        numbers = {k: float(v) for k, v in (logs or {}).items() if _is_number(v)}
        texts = consensus.exchange_texts(strategy, json.dumps(numbers), "save")
        return json.loads(next(iter(texts.values())))

    def write(self, path: str) -> None:
        """Save the model, or its weights."""
        save = saving.save_weights if self.save_weights_only else saving.save_model
        save(self.model, path)


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and not isinstance(value, str | bytes | None)


def is_old_format(callback: keras.callbacks.ModelCheckpoint) -> bool:
    """Whether a callback writes whole models as HDF5."""
    return not callback.save_weights_only and not callback.filepath.endswith(".keras")


class BackupAndRestore(keras.callbacks.Callback):
    """`keras.callbacks.BackupAndRestore` for several workers.

    Backs up the state of the training, including the state of all workers. When a new
    process calls `fit` again, training continues from there. With as many workers and
    the same input, the result is the same bit for bit as without the interruption. With
    more or fewer workers, the sum of the residuals is kept. Random streams of layers
    (`Dropout`), which Keras does not save, are backed up too. Use it on every worker,
    with the same arguments.

    Unlike in Keras's callback, every worker writes a part with its own residual,
    velocity or local weights, so that nothing of a model's size travels. A manifest
    with checksums, written when all parts are on their disks, completes the backup.
    Only then is the previous one removed. After a backup within an epoch (`save_freq` a
    number), `fit` continues within the epoch: it draws the batches that were trained on
    from the input and skips them.

    If all workers see `backup_dir`, what is the same on all is written once, and any
    number of workers can continue. If each has a directory of its own, the same number
    of workers can continue, each from its own; other numbers can if the files of all
    are put into one directory. With a `ServerOptimizer` each worker backs up on its
    own, in `backup_dir/worker-INDEX`.

    The state of other callbacks (`EarlyStopping`, `ReduceLROnPlateau`) is not backed
    up, as with Keras's callback.

    Args:
        backup_dir: a directory, local or on a mounted disk, that all workers see or
            each has for itself.
        save_freq: number of batches between backups, or "epoch".
        double_checkpoint: whether to keep the previous backup too, which all continue
            from if one of them cannot read the last one.
        delete_checkpoint: whether to delete the backup when `fit` ends.

    Raises:
        ValueError: for invalid arguments. Also on all workers, when training begins, if
            there are backups and none that all can read: the error names the files.
        RuntimeError: if a worker does not take part within `TF_DGC_TIMEOUT` seconds.
    """

    def __init__(
        self,
        backup_dir: saving.Path,
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ):
        super().__init__()
        if not backup_dir or "://" in str(backup_dir):
            raise ValueError(
                "`backup_dir` must be a local directory. "
                f"Received: backup_dir={show(backup_dir)}"
            )
        is_number = isinstance(save_freq, int) and save_freq > 0
        if isinstance(save_freq, bool) or not (is_number or save_freq == "epoch"):
            raise ValueError(
                '`save_freq` must be "epoch" or a number of batches, 1 or more. '
                f"Received: save_freq={show(save_freq)}"
            )
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self._directory = pathlib.Path(backup_dir)
        self._folder: BackupFolder | None = None
        self._restored: TrainingPosition | None = None
        self._file = self._directory  # of the backup that was restored
        self._train_function: Any = None  # the model's, while batches are skipped
        self._num_skipped = 0
        self._epoch = 0
        self._batches = 0  # of this epoch that are done
        self._since_backup = 0  # batches

    # Restore

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Continue from a backup, if there is one."""
        self._stop_skipping()  # if an error ended the last `fit` while it skipped
        model = self.model
        if not model.built:
            raise ValueError(
                "The model must be built before `fit` can continue from a backup. Give "
                "it an `Input`, or call `model.build(input_shape)`. "
                f"Received: model={model.name!r}"
            )
        _check_optimizers_are_built(model)
        directory = self._directory / _worker_directory(model)
        self._folder = BackupFolder(model.distribute_strategy, directory)
        generation = self._folder.find()
        if generation is not None:
            self._restore(self._folder, generation)

    def _restore(self, folder: BackupFolder, generation: Generation) -> None:
        model = self.model
        if not model.optimizer.built:
            with model.distribute_strategy.scope():
                model.optimizer.build(model.trainable_variables)
        self._file = folder.weights_file(generation)
        with folder.reading(generation) as (path, position, part):
            saved = backup.read_description(path)
            current = backup.describe_model(model)
            differences = backup.model_differences(saved, current)
            differences += _stream_differences(
                part.names(), set(backup.per_worker_variables(model))
            )
            if differences:
                raise self._mismatch("another model", differences)
            try:
                model.load_weights(path)
            except ValueError as error:
                # Keras prints every value of the variable that it could not load.
                lines = [_gist(str(error))]
                if saved.get("optimizer", current["optimizer"]) != current["optimizer"]:
                    lines.append(f"optimizer of the backup: {saved['optimizer']}")
                    lines.append(f"optimizer of this model: {current['optimizer']}")
                raise self._mismatch("another optimizer or model", lines) from None
            self._restore_per_worker_variables(part)
        keras_trainer.start_fit_at(model, position.epoch)
        self._restored = position
        if consensus.is_chief(model.distribute_strategy):
            message = self._describe_resumption(generation, position)
            print(f"tf_dgc: {message}", flush=True)

    def _restore_per_worker_variables(self, part: worker_parts.PartReader) -> None:
        local_results = self.model.distribute_strategy.experimental_local_results
        for name, variable in backup.per_worker_variables(self.model).items():
            values = part.take_own(name)
            for copy, value in zip(local_results(variable.value), values, strict=True):
                copy.assign(value)

    def _describe_resumption(
        self, generation: Generation, position: TrainingPosition
    ) -> str:
        """Return where training continues, counting epochs from 1 as Keras does."""
        epochs = (self.params or {}).get("epochs")
        of_all = "" if epochs is None else f" of {epochs}"
        if epochs is not None and position.epoch >= epochs:
            place = f"all {epochs} epochs are done"
        else:
            place = f"epoch {position.epoch + 1}{of_all}"
            if position.batches:
                place += f", after {position.batches} batches"
        num_replicas = self.model.distribute_strategy.num_replicas_in_sync
        writers = ""
        if generation.num_replicas != num_replicas:
            writers = f", written by {generation.num_replicas} replicas"
        return (
            f"resumed at {place}, from backup {generation.number} in "
            f"{str(self._file.parent)!r}{writers}"
        )

    def _mismatch(self, writer: str, differences: list[str]) -> ValueError:
        directory = str(self._file.parent)
        listed = "".join(f"\n  {line}" for line in differences)
        return ValueError(
            f"The backup {str(self._file)!r} was made by {writer}, and training cannot "
            f"continue from it:{listed}\nUse the model and optimizer of the backup. Or "
            f"delete the files `backup-*` in {directory!r} to start afresh, or pass "
            f"another directory. Received: backup_dir={str(self._directory)!r}"
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Skip the batches of this epoch that were trained on before the backup."""
        keras_trainer.start_fit_at(self.model, None)  # for the next `fit`
        self._epoch, self._batches = epoch, 0
        position, self._restored = self._restored, None
        if position is not None and position.batches:
            self._skip(position)

    def _skip(self, position: TrainingPosition) -> None:
        model = self.model
        train_function = model.train_function
        logs: dict[str, Any] = {}
        iterators: list[Any] = []

        def draw(iterator: Any) -> dict[str, Any]:
            if not iterators:
                iterators.append(iterator)
            if iterator is not iterators[0]:
                self._stop_skipping()  # an error ended the `fit` that skipped
                return train_function(iterator)
            for _ in range(model.steps_per_execution):
                batch = next(iterator)
                if not logs:
                    keras_trainer.build_metrics(model, batch)
                    self._assign_metrics(position.metrics)
                    logs.update(model.get_metrics_result())
            return logs

        self._train_function, self._num_skipped = train_function, position.batches
        model.train_function = draw

    def _stop_skipping(self) -> None:
        if self._train_function is not None:
            self.model.train_function = self._train_function
            self._train_function = None

    def _assign_metrics(self, values: list[Any]) -> None:
        variables = self.model.metrics_variables
        if len(variables) != len(values):
            paths = ", ".join(v.path for v in variables)
            line = (
                f"other random streams or metrics: {len(values)} values of metrics "
                f"in the backup, {len(variables)} in this model ({paths})"
            )
            raise self._mismatch("another model", [line])
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    # Back up

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Back up every `save_freq` batches."""
        done = batch + 1 - self._batches
        self._batches += done
        if self._train_function is not None:
            if self._batches >= self._num_skipped:
                self._stop_skipping()
            return
        self._since_backup += done
        if isinstance(self.save_freq, int) and self._since_backup >= self.save_freq:
            self._back_up(self._epoch, self._batches)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Back up every epoch."""
        self._stop_skipping()
        if self.save_freq == "epoch":
            self._back_up(epoch + 1, 0)

    def _back_up(self, epoch: int, batches: int) -> None:
        self._since_backup = 0
        position = backup.read_position(self.model, epoch, batches)
        if self._folder is not None:
            keep = 2 if self.double_checkpoint else 1
            self._folder.write(self.model, position, keep)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Delete the backup when all workers have ended."""
        keras_trainer.start_fit_at(self.model, None)
        strategy = self.model.distribute_strategy
        consensus.wait_for_workers(strategy, "finish training")
        if self.delete_checkpoint and self._folder is not None:
            self._folder.delete()


def _worker_directory(model: keras.Model) -> str:
    """Return the subdirectory of a worker that trains on its own (server), or ""."""
    optimizer = model.optimizer
    candidates = optimizer, getattr(optimizer, "inner_optimizer", None)
    return next(
        filter(None, (getattr(o, "backup_subfolder", "") for o in candidates)), ""
    )


def _stream_differences(saved: set[str], current: set[str]) -> list[str]:
    """Return how random streams and loss scales differ, none or one line."""
    if saved == current:
        return []
    before, now = (", ".join(sorted(names)) or "none" for names in (saved, current))
    return [f"other random streams or metrics: {before} in the backup, {now} here"]


def _gist(message: str) -> str:
    """Return what Keras's error is about: the first paragraph of what it quotes."""
    text = message.partition("Example error message for ")[2] or message
    text = text.partition(":\n\n")[2] or text
    text = text.partition("\n\n")[0].partition(", value=")[0]
    text = text.partition(" Without the state: ")[0]  # which a backup always has
    return " ".join(text.split())[:_MAX_LENGTH]


def _check_optimizers_are_built(model: keras.Model) -> None:
    """Raise `ValueError` for further optimizers whose state would not be loaded."""
    for name, value in vars(model).items():
        is_scaled = isinstance(value, keras.optimizers.LossScaleOptimizer)
        optimizer = value.inner_optimizer if is_scaled else value
        is_ours = getattr(optimizer, "saved_by_all_workers", False)
        if is_ours and not optimizer.built and value is not model.optimizer:
            raise ValueError(
                f"The model's `{name}` must be built before `fit` can continue from a "
                "backup, or its state could not be loaded: `with strategy.scope(): "
                f"model.{name}.build(variables)`, with the variables that it trains. "
                f"Received: {show(optimizer)}"
            )
