"""Saving by `model.save` and Keras's callbacks, if all workers have the same path.

One worker writes, for Keras's callbacks that save, and for `model.save` and
`model.save_weights` once `fit` has been called. If the whole state is the same on all
workers, as with an optimizer of Keras, one worker may save without the others: then all
that call `model.save` write.
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

SAVE_INSTEAD = (
    "Save by `tf_dgc.saving.save_model` or `save_weights`, or by `tf_dgc.callbacks"
    ".ModelCheckpoint` or `BackupAndRestore`: call them on all workers, and one of "
    "them writes. Or give every worker a path of its own."
)


def finish_save_together(strategy: tf.distribute.Strategy) -> None:
    """Make Keras's saving, on every worker, return when all have written."""
    if not consensus.is_multi_worker(strategy):
        return
    saved = save_hooks.saving_of("keras")
    path = None if saved is None else saved.path
    if _check_paths(strategy, path, saved is not None) and saved is not None:
        saved.call_at_end(lambda error: _end_saving(strategy, error))


def finish_checkpoint_together(strategy: tf.distribute.Strategy) -> None:
    """Make `tf.train.Checkpoint` return when all workers have written."""
    saved = save_hooks.saving_of("checkpoint")
    if saved is not None and consensus.is_multi_worker(strategy):
        saved.call_at_end(lambda error: _end_checkpoint(strategy, error))


def _end_checkpoint(
    strategy: tf.distribute.Strategy, error: BaseException | None
) -> None:
    if error is None:
        consensus.wait_for_workers(strategy, "finish saving")


def _end_saving(strategy: tf.distribute.Strategy, error: BaseException | None) -> None:
    if error is None:
        consensus.wait_for_workers(strategy, "finish saving")
    elif isinstance(error, OSError):  # this worker raises it
        consensus.worker_failure(strategy, f"could not save: {error}")


def _check_paths(
    strategy: tf.distribute.Strategy, path: str | None, writes: bool
) -> bool:
    """Return whether all workers write; raise if two write to the same file."""
    text = json.dumps([writes, path and [os.path.realpath(path), _inode(path)]])
    texts = consensus.exchange_texts(strategy, text, "save")
    answers = {peer: json.loads(text) for peer, text in texts.items()}
    paths = {peer: str(path) for peer, (_, path) in answers.items() if path}
    if len(set(paths.values())) < len(paths):
        raise ValueError(
            "Several workers write to the same file at once, which would destroy it. "
            f"{SAVE_INSTEAD} Received: {paths}"
        )
    return all(writes for writes, _ in answers.values())


def _inode(path: str) -> int | None:
    """Return what distinguishes files of the same path on two machines."""
    return os.stat(path).st_ino if os.path.exists(path) else None


def prepare_saving(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Make one worker write if all have the same path, in `fit` and after it."""
    _wrap_save(strategy, model, "save", ".keras", saving.save_model)
    _wrap_save(strategy, model, "save_weights", ".weights.h5", saving.save_weights)


def _wrap_save(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    name: str,
    ending: str,
    save_on_one: Callable[[keras.Model, saving.Path], None],
) -> None:
    stock = getattr(model, name)

    @functools.wraps(stock)
    def save(filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        write = functools.partial(stock, overwrite=overwrite, **kwargs)
        needs_all = _is_saved_by_all(model)
        replaces = overwrite and not kwargs
        if saving.is_writing():
            write(filepath)
        elif not needs_all and replaces and _is_one_file(model, name, filepath):
            _write_without_others(strategy, write, filepath)
        elif not needs_all or not _is_one_path(strategy, model, filepath):
            with saving.raise_on_all_workers(strategy, filepath):
                write(filepath)
        elif replaces and str(filepath).endswith(ending):
            save_on_one(model, filepath)
        else:
            raise ValueError(
                f"If all workers call `{name}` with the same path, it must be to a "
                f"file that ends in {ending!r}, and without `overwrite=False` and "
                f"other arguments. {SAVE_INSTEAD} Received: filepath={show(filepath)}, "
                f"overwrite={show(overwrite)}, other arguments: {show(kwargs)}"
            )

    setattr(model, name, save)


def _is_one_path(
    strategy: tf.distribute.Strategy, model: keras.Model, filepath: Any
) -> bool:
    average_statistics(model)  # before anything is saved, on all workers
    return saving.is_one_path(strategy, filepath)


_ONE_FILE = {"save": (".keras", ".h5"), "save_weights": (".weights.h5",)}


def _is_one_file(model: keras.Model, name: str, filepath: Any) -> bool:
    """Whether Keras's own `save` or `save_weights` writes one local file there."""
    stock = getattr(type(model), name) is getattr(keras.Model, name)
    return (
        stock and saving.is_local(filepath) and str(filepath).endswith(_ONE_FILE[name])
    )


def _write_without_others(
    strategy: tf.distribute.Strategy, write: Callable[[Any], None], filepath: Any
) -> None:
    """Write state that all workers share to a temporary file; the last one stays."""
    path = pathlib.Path(filepath)
    with (
        saving.raise_on_all_workers(strategy, path),
        saving.replacing(path) as unfinished,
    ):
        write(unfinished)


def _is_saved_by_all(model: keras.Model) -> bool:
    optimizer = getattr(model, "optimizer", None)  # none if it was not compiled
    candidates = optimizer, getattr(optimizer, "inner_optimizer", None)
    return any(getattr(o, "saved_by_all_workers", False) for o in candidates)


def share_callbacks(
    strategy: tf.distribute.Strategy, callbacks: keras.callbacks.CallbackList
) -> None:
    """Make one worker write for Keras's callbacks that save to one path for all."""
    needs_all = _is_saved_by_all(callbacks.model)
    saving_callbacks = {i: c for i, c in enumerate(callbacks.callbacks) if _path(c)}
    required = [
        type(c).__name__ for c in saving_callbacks.values() if needs_all or _restores(c)
    ]
    keys = {i: _key(c) for i, c in saving_callbacks.items()}
    text = json.dumps([required, sorted(set(keys.values()))])
    texts = consensus.exchange_texts(strategy, text, "begin to train")
    answers = {peer: json.loads(text) for peer, text in texts.items()}
    required_of_all = {peer: names for peer, (names, _) in answers.items()}
    if any(names != required for names in required_of_all.values()):
        raise ValueError(
            "All workers must be given the same callbacks that "
            f"{_WHY_ALL[needs_all]}. Received: {required_of_all}"
        )
    common = set.intersection(*(set(peer_keys) for _, peer_keys in answers.values()))
    for key in sorted(common):
        _share(strategy, callbacks, [i for i in keys if keys[i] == key])


_WHY_ALL = {
    True: "save, as each holds a part of the state",
    False: "restore, as all must continue from the same place",
}


def _share(
    strategy: tf.distribute.Strategy,
    callbacks: keras.callbacks.CallbackList,
    indices: list[int],
) -> None:
    """Make one worker write for these callbacks, which have the same path."""
    if not saving.is_one_path(strategy, _path(callbacks.callbacks[indices[0]])):
        return
    for i in indices:
        callbacks.callbacks[i] = _for_all(callbacks.callbacks[i])
        callbacks.callbacks[i].set_model(callbacks.model)
        callbacks.callbacks[i].set_params(callbacks.params)


def _key(callback: keras.callbacks.Callback) -> str:
    """Return class and path, which workers must have in common to share a callback."""
    return f"{type(callback).__name__} {os.path.realpath(_path(callback) or '')}"


def _restores(callback: keras.callbacks.Callback) -> bool:
    return isinstance(callback, keras.callbacks.BackupAndRestore)


def _path(callback: keras.callbacks.Callback) -> str | None:
    """Return where one of Keras's own callbacks saves; None for other callbacks."""
    if _restores(callback):
        return os.path.join(callback.backup_dir, "latest.weights.h5")
    is_ours = isinstance(callback, ModelCheckpoint)
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and not is_ours:
        return callback.filepath
    return None


def _for_all(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Return a callback that does the same, with one worker that writes."""
    if type(callback) is keras.callbacks.ModelCheckpoint:
        if _is_saved_by_all(callback.model) or not is_old_format(callback):
            shared = object.__new__(ModelCheckpoint)
            shared.__dict__ = callback.__dict__  # the user may read `callback.best`
            shared.check_filepath()
            return shared
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
    return callback  # saves by `model.save` or `save_weights`: see `_wrap_save`
