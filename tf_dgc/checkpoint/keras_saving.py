"""Keras's and TensorFlow's own ways to save end when all workers have written."""

import functools
import json
import os

import tensorflow as tf

from tf_dgc._internals import checkpoints, stores
from tf_dgc.cluster import meeting

INSTEAD = (
    "Save by `tf_dgc.saving.save_model` or `save_weights`, by `tf_dgc.callbacks"
    ".ModelCheckpoint` or `BackupAndRestore`, by which one worker writes and all take "
    "part; or give every worker a path of its own."
)


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
            f"{INSTEAD} Received: {paths}"
        )
    return all(writes for writes, _ in said.values())


def _inode(path: str) -> int | None:
    """Return what tells two files of the same path on two machines apart."""
    return os.stat(path).st_ino if os.path.exists(path) else None
