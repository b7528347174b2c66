"""Keras's and TensorFlow's own ways to save, when several workers use them.

A save ends when all workers have written. And where all were given one path, one of
them writes: in the callbacks of `fit`, and by `model.save` and `model.save_weights`
once `fit` has seen the model.
"""

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import checkpoints, stores, trainer
from tf_dgc.checkpoint import resuming, saving
from tf_dgc.cluster import meeting
from tf_dgc.training.statistics import average_statistics

_INSTEAD = (
    "Save by `tf_dgc.saving.save_model` or `save_weights`, by `tf_dgc.callbacks"
    ".ModelCheckpoint` or `BackupAndRestore`, by which one worker writes and all take "
    "part; or give every worker a path of its own."
)


# --- the end of a save ----------------------------------------------------------------


def end_together(strategy: tf.distribute.Strategy) -> None:
    """Make Keras, which saves an optimizer on all workers, end when all have written.

    Call it on every worker while the optimizer is saved.

    Raises:
        ValueError: on all workers, if two of them write to the same file.
        RuntimeError: if a worker does not save.
    """
    if not meeting.is_multi_worker(strategy):
        return
    file = checkpoints.closed_last()
    if _own_files(strategy, stores.path_being_saved(), file is not None):
        checkpoints.call_when_closed(file, functools.partial(_end, strategy))


def end_checkpoint_together(strategy: tf.distribute.Strategy) -> None:
    """Make `tf.train.Checkpoint` and its manager end when all workers have written."""
    if meeting.is_multi_worker(strategy):
        end = functools.partial(_end, strategy, None)
        checkpoints.call_when_checkpoint_is_written(end)


def _end(strategy: tf.distribute.Strategy, error: BaseException | None) -> None:
    if error is None:
        meeting.rendezvous(strategy, "finish saving")
    elif isinstance(error, OSError):  # which this worker raises
        meeting.failure(strategy, f"could not save: {error}")


def _own_files(
    strategy: tf.distribute.Strategy, path: str | None, writes: bool
) -> bool:
    """Return whether all workers write something, each a file of its own.

    Args:
        strategy: strategy whose workers save.
        path: path that this worker writes to, if it is known.
        writes: whether this worker writes, to whatever path.
    """
    note = json.dumps([writes, path and [os.path.realpath(path), _inode(path)]])
    notes = meeting.share_notes(strategy, note, "save")
    said = {peer: json.loads(text) for peer, text in notes.items()}
    paths = {peer: str(path) for peer, (_, path) in said.items() if path}
    if len(set(paths.values())) < len(paths):
        raise ValueError(
            "Several workers write to the same file at once, which would destroy it. "
            f"{_INSTEAD} Received: {paths}"
        )
    return all(writes for writes, _ in said.values())


def _inode(path: str) -> int | None:
    """Return what tells two files of the same path on two machines apart."""
    return os.stat(path).st_ino if os.path.exists(path) else None


# --- one path for all -----------------------------------------------------------------


def mend_saving(strategy: tf.distribute.Strategy) -> None:
    """Let one worker write where all are given one path, in and after `fit`.

    Keras distributes the data at the beginning of `fit`; there its model is found, and
    what that instance saves by is wrapped.
    """
    stock = strategy.experimental_distribute_dataset

    def experimental_distribute_dataset(*args: Any, **kwargs: Any) -> Any:
        dataset = stock(*args, **kwargs)
        model = trainer.calling_trainer()
        if model is not None and not getattr(model, "_tf_dgc_saves", False):
            model._tf_dgc_saves = True
            _wrap_save(strategy, model, "save", ".keras", saving.save_model)
            _wrap_save(
                strategy, model, "save_weights", ".weights.h5", saving.save_weights
            )
            begin = functools.partial(_share_callbacks, strategy)
            checkpoints.call_when_fit_begins(model, begin)
        return dataset

    strategy.experimental_distribute_dataset = experimental_distribute_dataset


def _wrap_save(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    name: str,
    ending: str,
    one_writes: Callable[[keras.Model, saving.Path], None],
) -> None:
    stock = getattr(model, name)

    @functools.wraps(stock)
    def save(filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        by_all = _is_saved_by_all(model) and not saving.is_writing()
        shared = by_all and saving.is_one_path(strategy, filepath)
        if by_all:
            average_statistics(model)
        if not shared:
            with saving.told_to_all(strategy, filepath):
                stock(filepath, overwrite=overwrite, **kwargs)
        elif str(filepath).endswith(ending) and overwrite and not kwargs:
            one_writes(model, filepath)
        else:
            raise ValueError(
                f"`{name}` to one path for all workers must be to a file that ends in "
                f"{ending!r}, and without further arguments. {_INSTEAD} Received: "
                f"filepath={filepath!r}, overwrite={overwrite!r}, {kwargs}"
            )

    setattr(model, name, save)


def _is_saved_by_all(model: keras.Model) -> bool:
    """Whether the model has an optimizer that every worker has to save."""
    optimizer = model.optimizer
    candidates = optimizer, getattr(optimizer, "inner_optimizer", None)
    return any(getattr(o, "saved_by_all_workers", False) for o in candidates)


def _share_callbacks(
    strategy: tf.distribute.Strategy, callbacks: keras.callbacks.CallbackList
) -> None:
    """Let one worker write for Keras's callbacks that save, if all have one path.

    Raises:
        ValueError: on all workers, if that cannot be.
    """
    if not _is_saved_by_all(callbacks.model):
        return
    saves = {i: _path(c) for i, c in enumerate(callbacks.callbacks) if _path(c)}
    note = json.dumps([type(callbacks.callbacks[i]).__name__ for i in saves])
    notes = meeting.share_notes(strategy, note, "begin to train")
    if len(set(notes.values())) > 1:
        raise ValueError(
            "All workers must be given the same callbacks that save, as each holds a "
            f"part of what is saved. Received: {notes}"
        )
    for i, path in saves.items():
        if saving.is_one_path(strategy, path):
            callbacks.callbacks[i] = _for_all(callbacks.callbacks[i])
            callbacks.callbacks[i].set_model(callbacks.model)
            callbacks.callbacks[i].set_params(callbacks.params)


def _path(callback: keras.callbacks.Callback) -> str | None:
    """Return where one of Keras's own callbacks saves."""
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        return os.path.join(callback.backup_dir, "latest.weights.h5")
    ours = isinstance(callback, resuming.ModelCheckpoint)
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and not ours:
        return callback.filepath
    return None


def _for_all(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return a callback that does the same, and of which one worker writes."""
    if type(callback) is keras.callbacks.ModelCheckpoint:
        callback.__class__ = resuming.ModelCheckpoint
        callback.check_filepath()
    elif type(callback) is keras.callbacks.BackupAndRestore:
        return resuming.BackupAndRestore(
            callback.backup_dir,
            callback.save_freq,
            callback.double_checkpoint,
            callback.delete_checkpoint,
        )
    elif isinstance(callback, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "Several workers would write to the same backup at once, which would "
            "destroy it. Derive the callback from `tf_dgc.callbacks.BackupAndRestore`, "
            "or give every worker a directory of its own. Received: "
            f"{type(callback).__name__}, backup_dir={callback.backup_dir!r}"
        )
    return callback  # it saves by `model.save`, or `save_weights`: see `_wrap_save`
