"""Keras's callbacks that save, for models that several workers train."""

import json
import pathlib
from typing import Any

import keras
import numpy as np

from tf_dgc._internals import keras_trainer, save_hooks
from tf_dgc.arguments import show
from tf_dgc.multiworker import backup, consensus, saving, worker_parts
from tf_dgc.multiworker.backup import BackupFolder, Generation, TrainingPosition

_LONGEST = 1000  # characters of an error of Keras's that are repeated


class ModelCheckpoint(save_hooks.ModelCheckpointHooks):
    """`keras.callbacks.ModelCheckpoint` for several workers.

    The arguments are Keras's, and so is what it does, but that one worker writes the
    file while all take part, and that a file is replaced when the new one is complete,
    not before. Use it on every worker, with the same arguments.

    Raises:
        ValueError: for a `filepath` that does not end in `.keras`, or in `.weights.h5`
            with `save_weights_only=True`. The old `.h5` format has no place for state
            that differs between workers.
    """

    def __init__(self, filepath: saving.Path, *args: Any, **kwargs: Any):
        super().__init__(filepath, *args, **kwargs)
        self.check_filepath()

    def check_filepath(self) -> None:
        """Raise `ValueError` for an ending that cannot be."""
        if is_old_format(self):
            raise ValueError(
                "`filepath` must end in `.keras`, or in `.weights.h5` with "
                f"`save_weights_only=True`. Received: filepath={show(self.filepath)}"
            )

    def logs_of_all(self, logs: dict[str, Any] | None) -> dict[str, Any]:
        """Return the first worker's logs, by which all save, or none.

        Within an epoch logs are each worker's own.
        """
        strategy = self.model.distribute_strategy
        numbers = {k: float(v) for k, v in (logs or {}).items() if _is_number(v)}
        notes = consensus.exchange_texts(strategy, json.dumps(numbers), "save")
        return json.loads(next(iter(notes.values())))

    def write(self, path: str) -> None:
        """Save the model, or its weights."""
        save = saving.save_weights if self.save_weights_only else saving.save_model
        save(self.model, path)


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and not isinstance(value, str | bytes | None)


def is_old_format(callback: keras.callbacks.ModelCheckpoint) -> bool:
    """Whether it writes whole models as HDF5."""
    return not callback.save_weights_only and not callback.filepath.endswith(".keras")


class BackupAndRestore(keras.callbacks.Callback):
    """`keras.callbacks.BackupAndRestore` for several workers.

    Backs up what training has come to, state of all workers included, and goes on from
    there when `fit` is called again by a new process: with as many workers and the same
    input, bit for bit as if nothing had happened; with more or fewer workers, with the
    total of what was not yet sent. Random streams of layers (`Dropout`), which Keras
    does not save, are backed up too. Use it on every worker, with the same arguments.

    It differs from Keras's in this: every worker writes a part, with its own residual,
    velocity or local weights, so that nothing of a model's size travels; a manifest
    with checksums, written when all parts are on their disks, makes a backup of them,
    and only then is the one before removed. After a backup within an epoch
    (`save_freq` a number), `fit` goes on within the epoch: batches that were trained on
    are drawn from the input and left out.

    Where all workers see `backup_dir`, what all have alike is written once, and any
    number of workers can go on. Where each has a directory of its own, as many go on,
    each from its own; others if the files of all are put into one. With a
    `ServerOptimizer` each worker backs up for itself, in `backup_dir/worker-INDEX`.

    Callbacks with a memory of their own (`EarlyStopping`, `ReduceLROnPlateau`) begin
    anew, as with Keras's.

    Args:
        backup_dir: a directory, local or on a mounted disk, that all workers see or
            each has for itself.
        save_freq: number of batches between backups, or "epoch".
        double_checkpoint: whether to keep the backup before the last one too, which
            all go on from if one cannot read the last one.
        delete_checkpoint: whether to delete the backup when `fit` comes to its end.

    Raises:
        ValueError: for other arguments; on all workers, when training begins, if there
            are backups and none that all can read: it names the files.
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
        self._backups: BackupFolder | None = None
        self._restored: TrainingPosition | None = None
        self._file = self._directory  # of the backup that was restored
        self._train: Any = None  # the train function, while batches are left out
        self._left_out = 0
        self._epoch = 0
        self._batches = 0  # of this epoch that are done
        self._since = 0  # batches since the last backup

    # --- restore --------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Go on from a backup, if there is one."""
        self._train_again()  # if the last run ended while batches were left out
        model = self.model
        if not model.built:
            raise ValueError(
                "The model must be built before `fit` can go on from a backup. Give "
                "it an `Input`, or call `model.build(input_shape)`. "
                f"Received: model={model.name!r}"
            )
        _check_built(model)
        directory = self._directory / _own_backup(model)
        self._backups = BackupFolder(model.distribute_strategy, directory)
        found = self._backups.find()
        if found is not None:
            self._restore(self._backups, found)

    def _restore(self, backups: BackupFolder, found: Generation) -> None:
        model = self.model
        if not model.optimizer.built:
            with model.distribute_strategy.scope():
                model.optimizer.build(model.trainable_variables)
        self._file = backups.weights_file(found)
        with backups.reading(found) as (path, where, part):
            saved, own = backup.read_description(path), backup.describe(model)
            differences = backup.differences(saved, own)
            differences += _other_streams(
                part.names(), set(backup.own_variables(model))
            )
            if differences:
                raise self._refused("another model", differences)
            try:
                model.load_weights(path)
            except ValueError as error:
                # Keras lists every value of the variable that it could not load.
                lines = [_gist(str(error))]
                if saved.get("optimizer", own["optimizer"]) != own["optimizer"]:
                    lines.append(f"optimizer of the backup: {saved['optimizer']}")
                    lines.append(f"optimizer of this model: {own['optimizer']}")
                raise self._refused("another optimizer or model", lines) from None
            self._restore_own(part)
        keras_trainer.start_fit_at(model, where.epoch)
        self._restored = where
        if consensus.is_chief(model.distribute_strategy):
            print(f"tf_dgc: {self._resumed_at(found, where)}", flush=True)

    def _resumed_at(self, found: Generation, where: TrainingPosition) -> str:
        """Return where training goes on, counting epochs from 1 as Keras does."""
        epochs = (self.params or {}).get("epochs")
        of_all = "" if epochs is None else f" of {epochs}"
        if epochs is not None and where.epoch >= epochs:
            place = f"all {epochs} epochs are done"
        elif where.batches:
            place = f"epoch {where.epoch + 1}{of_all}, after {where.batches} batches"
        else:
            place = f"epoch {where.epoch + 1}{of_all}"
        now = self.model.distribute_strategy.num_replicas_in_sync
        written = f", written by {found.num_replicas} replicas" * (
            found.num_replicas != now
        )
        return (
            f"resumed at {place}, from backup {found.number} in "
            f"{str(self._file.parent)!r}{written}"
        )

    def _refused(self, who: str, differences: list[str]) -> ValueError:
        """Return the error for a backup that does not fit the model.

        Args:
            who: name of what made the backup.
            differences: lines that say what differs.
        """
        directory = str(self._file.parent)
        listed = "".join(f"\n  {line}" for line in differences)
        return ValueError(
            f"The backup {str(self._file)!r} was made by {who}, and training cannot go "
            f"on from it:{listed}\nGo on with what made it. Or delete the files "
            f"`backup-*` in {directory!r}, and training starts afresh; or pass another "
            f"directory. Received: backup_dir={str(self._directory)!r}"
        )

    def _restore_own(self, part: worker_parts.PartReader) -> None:
        """Give every local replica its own streams, and its own loss scale."""
        local = self.model.distribute_strategy.experimental_local_results
        for name, variable in backup.own_variables(self.model).items():
            values = part.take_own(name)
            for copy, value in zip(local(variable.value), values, strict=True):
                copy.assign(value)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Leave out what of this epoch was trained on before the backup."""
        keras_trainer.start_fit_at(self.model, None)  # or an error leaves it to others
        self._epoch, self._batches = epoch, 0
        restored, self._restored = self._restored, None
        if restored is not None and restored.batches:
            self._leave_out(restored)

    def _leave_out(self, restored: TrainingPosition) -> None:
        """Draw batches that are done, instead of training on them."""
        model = self.model
        train = model.train_function
        logs: dict[str, Any] = {}
        inputs: list[Any] = []

        def draw(iterator: Any) -> dict[str, Any]:
            if not inputs:
                inputs.append(iterator)
            if iterator is not inputs[0]:
                self._train_again()  # an error ended the `fit` that this is for
                return train(iterator)
            for _ in range(model.steps_per_execution):
                batch = next(iterator)
                if not logs:
                    keras_trainer.build_metrics(model, batch)
                    self._assign_metrics(restored.metrics)
                    logs.update(model.get_metrics_result())
            return logs

        self._train, self._left_out = train, restored.batches
        model.train_function = draw

    def _assign_metrics(self, values: list[Any]) -> None:
        variables = self.model.metrics_variables
        if len(variables) != len(values):
            paths = ", ".join(v.path for v in variables)
            line = f"other random streams or metrics: {len(values)} values of metrics "
            line += f"in the backup, {len(variables)} in this model ({paths})"
            raise self._refused("another model", [line])
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _train_again(self) -> None:
        if self._train is not None:
            self.model.train_function = self._train
            self._train = None

    # --- back up --------------------------------------------------------------------

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Back up every `save_freq` batches."""
        done = batch + 1 - self._batches
        self._batches += done
        if self._train is not None:
            if self._batches >= self._left_out:
                self._train_again()
            return
        self._since += done
        if isinstance(self.save_freq, int) and self._since >= self.save_freq:
            self._back_up(self._epoch, self._batches)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Back up every epoch."""
        self._train_again()
        if self.save_freq == "epoch":
            self._back_up(epoch + 1, 0)

    def _back_up(self, epoch: int, batches: int) -> None:
        self._since = 0
        now = backup.read_position(self.model, epoch, batches)
        keep = 2 if self.double_checkpoint else 1
        if self._backups is not None:
            self._backups.write(self.model, now, keep)

    # --- the end --------------------------------------------------------------------

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Delete the backup, when all workers have come this far."""
        keras_trainer.start_fit_at(self.model, None)
        strategy = self.model.distribute_strategy
        consensus.wait_for_workers(strategy, "finish training")
        if self.delete_checkpoint and self._backups is not None:
            self._backups.delete()


def _own_backup(model: keras.Model) -> str:
    """Return where in the directory a worker backs up for itself; "" with all others.

    With a parameter server each trains by itself, and has state that nobody else has.
    """
    optimizer = model.optimizer
    candidates = optimizer, getattr(optimizer, "inner_optimizer", None)
    return next(filter(None, (getattr(o, "own_backup", "") for o in candidates)), "")


def _other_streams(saved: set[str], own: set[str]) -> list[str]:
    """Return how random streams and loss scales differ, none or one line."""
    if saved == own:
        return []
    there, here = (", ".join(sorted(names)) or "none" for names in (saved, own))
    return [f"other random streams or metrics: {there} in the backup, {here} here"]


def _gist(message: str) -> str:
    """Return what Keras's error is about: the first paragraph of what it quotes."""
    text = message.partition("Example error message for ")[2] or message
    text = text.partition(":\n\n")[2] or text
    text = text.partition("\n\n")[0].partition(", value=")[0]
    text = text.partition(" Without the state: ")[0]  # which a backup always has
    return " ".join(text.split())[:_LONGEST]


def _check_built(model: keras.Model) -> None:
    """Raise `ValueError` for optimizers of a model whose state would not be loaded.

    The one that it was compiled with is built before a backup is read.
    """
    for name, value in vars(model).items():
        scaled = isinstance(value, keras.optimizers.LossScaleOptimizer)
        optimizer = value.inner_optimizer if scaled else value
        ours = getattr(optimizer, "saved_by_all_workers", False)
        if ours and not optimizer.built and value is not model.optimizer:
            raise ValueError(
                f"The model's `{name}` must be built before `fit` can go on from a "
                "backup, or its state could not be loaded: `with strategy.scope(): "
                f"model.{name}.build(variables)`, with the variables that it trains. "
                f"Received: {show(optimizer)}"
            )
