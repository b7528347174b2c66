"""Save a model that several workers train: one file, complete or not there at all.

Every worker has to call these functions, since each holds a part of what is saved. One
of them writes.

>>> tf_dgc.saving.save_model(model, "model.keras")
>>> model = keras.models.load_model("model.keras")  # also on every worker
"""

import contextlib
import contextvars
import functools
import os
import pathlib
import re
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import save_hooks
from tf_dgc.multiworker import consensus, consensus_weights, hdf5
from tf_dgc.multiworker.layer_statistics import average_statistics

Path = str | os.PathLike
_UNFINISHED = ".unfinished."
_DRAWN = r"[0-9a-f]{32}"
_LEFT_SECONDS = 3600.0  # without a write, behind which nobody writes any more

UNFINISHED = re.escape(_UNFINISHED) + _DRAWN + r"\."
"""Regular expression of what is before the name of a file while it is written."""


def save_model(model: keras.Model, filepath: Path) -> None:
    """Do what `model.save` does, on several workers, and replace the file at once.

    The file is written beside its place and then moved there: until it is complete, a
    file that was there before stays as it was, whatever happens to the process.

    Args:
        model: Keras model, compiled under the workers' strategy.
        filepath: path of a file, local or on a mounted disk, ending in `.keras`.

    Raises:
        ValueError: for another ending.
        OSError: if the file cannot be written. With several workers, `RuntimeError`
            on all of them.
        RuntimeError: if a worker does not call it within `TF_DGC_TIMEOUT` seconds.
    """
    save(model, filepath, ".keras", model.save)


def save_weights(model: keras.Model, filepath: Path) -> None:
    """Do what `model.save_weights` does, as `save_model` does it.

    Args:
        model: Keras model, compiled under the workers' strategy.
        filepath: path of a file, local or on a mounted disk, ending in `.weights.h5`.

    Raises:
        ValueError: as `save_model`.
        OSError: as `save_model`.
        RuntimeError: as `save_model`.
    """
    save(model, filepath, ".weights.h5", functools.partial(_write_weights, model))


def _write_weights(model: keras.Model, path: pathlib.Path) -> None:
    if type(model).save_weights is not keras.Model.save_weights:
        model.save_weights(path)
        return
    with hdf5.writing_hdf5(path) as writing:
        save_hooks.save_weights(model, writing.file, writing.check)


def save(
    model: keras.Model,
    filepath: Path,
    ending: str,
    write: Callable[[pathlib.Path], Any],
) -> None:
    """Let one worker write, and all others take part.

    Args:
        model: Keras model whose variables `write` reads.
        filepath: path of the file, local.
        ending: ending that the path must have, with its dot.
        write: function that saves to the path that it is given.
    """
    path = pathlib.Path(filepath)
    if not path.name.endswith(ending) or not is_local(filepath):
        raise ValueError(
            f"`filepath` must be a local path that ends in {ending!r}. "
            f"Received: filepath={str(filepath)!r}"
        )
    strategy = model.distribute_strategy
    average_statistics(model)
    with consensus_weights.consensus_weights(model, "save"):
        if consensus.is_chief(strategy):
            with (
                raise_on_all_workers(strategy, path),
                replacing(path) as unfinished,
                _writing(),
            ):
                write(unfinished)
        else:
            save_hooks.join_save(model)
    consensus.wait_for_workers(strategy, f"finish saving {str(path)!r}")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a path to write to; what is there in the end takes the place of `path`.

    After an error, or the death of the process, `path` is what it was before. The path
    is this writer's own: of several at once, each writes a whole file, and the last to
    end has it. As when a file is written to, a link stays one, and permissions stay.
    """
    path = pathlib.Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = path.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}.{path.name}")
    try:
        yield mine
        with contextlib.suppress(OSError):
            mine.chmod(stat.S_IMODE(path.stat().st_mode))
        _flush(mine)
        os.replace(mine, path)
        _flush(path.parent)
    finally:
        mine.unlink(missing_ok=True)
    _remove_left(path)


def _remove_left(path: pathlib.Path) -> None:
    """Remove what processes that died left when they wrote this file.

    By times that the disk tells, which may be another machine's.
    """
    with contextlib.suppress(OSError):
        old = path.stat().st_mtime - _LEFT_SECONDS
        for other in unfinished(path):
            if other.stat().st_mtime < old:
                other.unlink(missing_ok=True)


def unfinished(path: pathlib.Path) -> list[pathlib.Path]:
    """Return what is being written to take the place of a file, or was left of that."""
    name = re.compile(UNFINISHED + re.escape(path.name))
    return [other for other in path.parent.iterdir() if name.fullmatch(other.name)]


def _flush(path: pathlib.Path) -> None:
    """Wait until the disk has the file, or the directory's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_is_writing = contextvars.ContextVar("is_writing", default=False)


def is_writing() -> bool:
    """Whether this worker is the one that writes, while the others take part."""
    return _is_writing.get()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    token = _is_writing.set(True)
    try:
        yield
    finally:
        _is_writing.reset(token)


@contextlib.contextmanager
def raise_on_all_workers(strategy: tf.distribute.Strategy, path: Path) -> Iterator:
    """Let nobody wait for a worker that cannot write."""
    try:
        with hdf5.as_os_errors(path):
            yield
    except OSError as error:
        if not consensus.is_multi_worker(strategy):
            raise
        what = f"could not save {str(path)!r}: {error}"
        raise consensus.worker_failure(strategy, what) from error


def is_one_path(strategy: tf.distribute.Strategy, filepath: Any) -> bool:
    """Whether all workers, each of which calls this, write to the same local path.

    Args:
        strategy: strategy whose workers call it.
        filepath: path of a file of this worker, or whatever a user has given for one.
    """
    path = os.path.realpath(filepath) if is_local(filepath) else ""
    notes = consensus.exchange_texts(strategy, path, "save")
    return bool(path) and len(set(notes.values())) == 1 and _is_one_disk(strategy, path)


def is_local(filepath: Any) -> bool:
    """Whether this is a path, and no address such as `gs://...`."""
    return isinstance(filepath, (str, os.PathLike)) and "://" not in str(filepath)


def _is_one_disk(strategy: tf.distribute.Strategy, path: str) -> bool:
    """Whether all workers see the same directory there: one leaves a file in it."""
    directory = pathlib.Path(path.partition("{")[0]).parent
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".tf_dgc_", dir=directory) as mine:
        notes = consensus.exchange_texts(strategy, mine.name, "save")
        seen = all(map(os.path.exists, notes.values()))
        return (
            "False"
            not in consensus.exchange_texts(strategy, str(seen), "save").values()
        )


@contextlib.contextmanager
def checkpoint_directory(
    strategy: tf.distribute.Strategy, directory: Path
) -> Iterator[str]:
    """Yield the directory in which this worker is to write TensorFlow checkpoints.

    `tf.train.Checkpoint` writes on every worker. It must not be to the same place, and
    only one copy is needed: the first worker gets `directory`, the others temporary
    ones. All restore from `directory`:

    >>> checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    >>> checkpoint.restore(tf.train.latest_checkpoint("checkpoints"))
    >>> with tf_dgc.saving.checkpoint_directory(strategy, "checkpoints") as mine:
    ...     manager = tf.train.CheckpointManager(checkpoint, mine, max_to_keep=2)
    ...     ...  # train, and call `manager.save()` on every worker

    Args:
        strategy: strategy whose workers save.
        directory: path of the checkpoints, on a disk that all can read.
    """
    if consensus.is_chief(strategy):
        yield os.fspath(directory)
        return
    with tempfile.TemporaryDirectory(prefix="tf_dgc_") as temporary:
        yield temporary
