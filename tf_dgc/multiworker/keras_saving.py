"""One path for all workers, in the callbacks of `fit` and by `model.save`.

Where all were given one path, one of them writes: for Keras's callbacks that save, and
by `model.save` and `model.save_weights` once `fit` has seen the model. Only what
workers have alike, as with an optimizer of Keras, one of them may save alone: then all
who call `model.save` write, each for itself.
"""

import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import save_hooks
from tf_dgc.arguments import show
from tf_dgc.multiworker import consensus, saving
from tf_dgc.multiworker.callbacks import (
    BackupAndRestore,
    ModelCheckpoint,
    is_old_format,
)
from tf_dgc.multiworker.layer_statistics import average_statistics

# --- Keras's and TensorFlow's own ways to save end when all workers have written.

SAVE_INSTEAD = (
    "Save by `tf_dgc.saving.save_model` or `save_weights`, by `tf_dgc.callbacks"
    ".ModelCheckpoint` or `BackupAndRestore`, by which one worker writes and all take "
    "part; or give every worker a path of its own."
)


def finish_save_together(strategy: tf.distribute.Strategy) -> None:
    """Make Keras, which saves an optimizer on all workers, end when all have written.

    Call it on every worker while the optimizer is saved.

    Raises:
        ValueError: on all workers, if two of them write to the same file.
        RuntimeError: if a worker does not save.
    """
    if not consensus.is_multi_worker(strategy):
        return
    file = save_hooks.closed_last()
    if _own_files(strategy, save_hooks.path_being_saved(), file is not None):
        save_hooks.call_when_closed(file, functools.partial(_end, strategy))


def finish_checkpoint_together(strategy: tf.distribute.Strategy) -> None:
    """Make `tf.train.Checkpoint` and its manager end when all workers have written."""
    if consensus.is_multi_worker(strategy):
        end = functools.partial(_end, strategy, None)
        save_hooks.call_when_checkpoint_is_written(end)


def _end(strategy: tf.distribute.Strategy, error: BaseException | None) -> None:
    if error is None:
        consensus.wait_for_workers(strategy, "finish saving")
    elif isinstance(error, OSError):  # which this worker raises
        consensus.worker_failure(strategy, f"could not save: {error}")


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
    notes = consensus.exchange_texts(strategy, note, "save")
    said = {peer: json.loads(text) for peer, text in notes.items()}
    paths = {peer: str(path) for peer, (_, path) in said.items() if path}
    if len(set(paths.values())) < len(paths):
        raise ValueError(
            "Several workers write to the same file at once, which would destroy it. "
            f"{SAVE_INSTEAD} Received: {paths}"
        )
    return all(writes for writes, _ in said.values())


def _inode(path: str) -> int | None:
    """Return what tells two files of the same path on two machines apart."""
    return os.stat(path).st_ino if os.path.exists(path) else None


def prepare_saving(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Let one worker write where all are given one path, in and after `fit`.

    Args:
        strategy: strategy of several workers.
        model: Keras model, of which that instance's ways to save are wrapped.
    """
    _wrap_save(strategy, model, "save", ".keras", saving.save_model)
    _wrap_save(strategy, model, "save_weights", ".weights.h5", saving.save_weights)
    begin = functools.partial(_share_callbacks, strategy)
    save_hooks.call_when_fit_begins(model, begin)


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
        write = functools.partial(stock, overwrite=overwrite, **kwargs)
        by_all = _is_saved_by_all(model)
        replaces = overwrite and not kwargs
        if saving.is_writing():
            write(filepath)
        elif not by_all and replaces and _is_one_file(model, name, filepath):
            _write_alone(strategy, write, filepath)
        elif not by_all or not _is_one_path_when_averaged(strategy, model, filepath):
            with saving.raise_on_all_workers(strategy, filepath):
                write(filepath)
        elif replaces and str(filepath).endswith(ending):
            one_writes(model, filepath)
        else:
            raise ValueError(
                f"`{name}` to one path for all workers must be to a file that ends in "
                f"{ending!r}, and without further arguments. {SAVE_INSTEAD} "
                f"Received: filepath={show(filepath)}, overwrite={show(overwrite)}, "
                f"{show(kwargs)}"
            )

    setattr(model, name, save)


def _is_one_path_when_averaged(
    strategy: tf.distribute.Strategy, model: keras.Model, filepath: Any
) -> bool:
    average_statistics(model)
    return saving.is_one_path(strategy, filepath)


_ONE_FILE = {"save": (".keras", ".h5"), "save_weights": (".weights.h5",)}


def _is_one_file(model: keras.Model, name: str, filepath: Any) -> bool:
    """Whether Keras's own `save` or `save_weights` writes one local file there."""
    stock = getattr(type(model), name) is getattr(keras.Model, name)
    return (
        stock and saving.is_local(filepath) and str(filepath).endswith(_ONE_FILE[name])
    )


def _write_alone(
    strategy: tf.distribute.Strategy, write: Callable[[Any], None], filepath: Any
) -> None:
    """Write what all workers have alike, without asking whether others do too.

    Each writes beside the file's place, by a name of its own; the last one's stays.
    """
    path = pathlib.Path(filepath)
    with (
        saving.raise_on_all_workers(strategy, path),
        saving.replacing(path) as unfinished,
    ):
        write(unfinished)


def _is_saved_by_all(model: keras.Model) -> bool:
    """Whether the model has an optimizer that every worker has to save."""
    optimizer = getattr(model, "optimizer", None)  # none if it was not compiled
    candidates = optimizer, getattr(optimizer, "inner_optimizer", None)
    return any(getattr(o, "saved_by_all_workers", False) for o in candidates)


def _share_callbacks(
    strategy: tf.distribute.Strategy, callbacks: keras.callbacks.CallbackList
) -> None:
    """Let one worker write for Keras's callbacks that save, if all have one path.

    Where workers have all in common that is to be saved, some of them may be without.

    Raises:
        ValueError: on all workers, if that cannot be.
    """
    by_all = _is_saved_by_all(callbacks.model)
    saves = {i: c for i, c in enumerate(callbacks.callbacks) if _path(c)}
    needed = [type(c).__name__ for c in saves.values() if by_all or _restores(c)]
    places = {i: _place(c) for i, c in saves.items()}
    note = json.dumps([needed, sorted(set(places.values()))])
    notes = consensus.exchange_texts(strategy, note, "begin to train")
    of_all = {peer: json.loads(text) for peer, text in notes.items()}
    given = {peer: needed for peer, (needed, _) in of_all.items()}
    if any(names != needed for names in given.values()):
        raise ValueError(
            f"All workers must be given the same callbacks that {_WHY_ALL[by_all]}. "
            f"Received: {given}"
        )
    alike = set.intersection(*(set(found) for _, found in of_all.values()))
    for place in sorted(alike):
        _share(strategy, callbacks, [i for i, p in places.items() if p == place])


_WHY_ALL = {
    True: "save, as each holds a part of what is saved",
    False: "restore, as all have to go on from the same place",
}


def _share(
    strategy: tf.distribute.Strategy,
    callbacks: keras.callbacks.CallbackList,
    chosen: list[int],
) -> None:
    """Let one worker write for these callbacks, which have the same path."""
    if not saving.is_one_path(strategy, _path(callbacks.callbacks[chosen[0]])):
        return
    for i in chosen:
        callbacks.callbacks[i] = _for_all(callbacks.callbacks[i])
        callbacks.callbacks[i].set_model(callbacks.model)
        callbacks.callbacks[i].set_params(callbacks.params)


def _place(callback: keras.callbacks.Callback) -> str:
    """Return what is the same on workers whose callbacks may be one."""
    return f"{type(callback).__name__} {os.path.realpath(_path(callback) or '')}"


def _restores(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, keras.callbacks.BackupAndRestore)


def _path(callback: keras.callbacks.Callback) -> str | None:
    """Return where one of Keras's own callbacks saves."""
    if _restores(callback):
        return os.path.join(callback.backup_dir, "latest.weights.h5")
    ours = isinstance(callback, ModelCheckpoint)
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and not ours:
        return callback.filepath
    return None


def _for_all(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return a callback that does the same, and of which one worker writes."""
    if type(callback) is keras.callbacks.ModelCheckpoint:
        if _is_saved_by_all(callback.model) or not is_old_format(callback):
            callback.__class__ = ModelCheckpoint
            callback.check_filepath()
    elif type(callback) is keras.callbacks.BackupAndRestore:
        return BackupAndRestore(
            callback.backup_dir,
            callback.save_freq,
            callback.double_checkpoint,
            callback.delete_checkpoint,
        )
    elif _restores(callback):
        raise ValueError(
            "Several workers would write to the same backup at once, which would "
            "destroy it. Derive the callback from `tf_dgc.callbacks.BackupAndRestore`, "
            "or give every worker a directory of its own. Received: "
            f"{type(callback).__name__}, backup_dir={show(callback.backup_dir)}"
        )
    return callback  # it saves by `model.save`, or `save_weights`: see `_wrap_save`
