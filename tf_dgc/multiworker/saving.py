"""Save a model that several workers train, to one file that is always complete.

Every worker must call these functions, since each holds a part of the state. One of
them writes.

>>> tf_dgc.saving.save_model(model, "model.keras")
>>> model = keras.models.load_model("model.keras")  # also on every worker
"""

import contextlib
import contextvars
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
_ABANDONED_SECONDS = 3600.0  # without a write

UNFINISHED = re.escape(_UNFINISHED) + r"[0-9a-f]{32}\."
"""Regular expression of the prefix of a file's name while it is written."""


def save_model(model: keras.Model, filepath: Path) -> None:
    """Save a model as `model.save` does, with one file for all workers.

    The file is written under another name in the same directory and then renamed. Until
    then an existing file stays as it was, whatever happens to the process.

    Args:
        model: Keras model, compiled under the workers' strategy.
        filepath: path of a file, local or on a mounted disk, ending in `.keras`.

    Raises:
        ValueError: if the path has another ending.
        OSError: if the file cannot be written. With several workers, `RuntimeError`
            on all of them.
        RuntimeError: if a worker does not call it within `TF_DGC_TIMEOUT` seconds.
    """
    save(model, filepath, ".keras", model.save)


def save_weights(model: keras.Model, filepath: Path) -> None:
    """Save weights as `model.save_weights` does, in the way of `save_model`.

    Args:
        model: Keras model, compiled under the workers' strategy.
        filepath: path of a file, local or on a mounted disk, ending in `.weights.h5`.

    Raises:
        ValueError: as `save_model`.
        OSError: as `save_model`.
        RuntimeError: as `save_model`.
    """
    save(model, filepath, ".weights.h5", lambda path: _write_weights(model, path))


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
    """Call `write` on one worker, with a path; all others take part."""
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
    """Yield a unique temporary path, which replaces `path` unless writing fails."""
    # If several processes write at once, the last whole file stays. Links and
    # permissions are preserved.
    path = pathlib.Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}.{path.name}")
    try:
        yield temporary
        with contextlib.suppress(OSError):
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    _remove_abandoned(path)


def _remove_abandoned(path: pathlib.Path) -> None:
    """Remove temporary files of processes that died, by times of the disk alone."""
    with contextlib.suppress(OSError):
        limit = path.stat().st_mtime - _ABANDONED_SECONDS
        for other in unfinished(path):
            if other.stat().st_mtime < limit:
                other.unlink(missing_ok=True)


def unfinished(path: pathlib.Path) -> list[pathlib.Path]:
    """Return all temporary files that are being, or were being, written for a file."""
    name = re.compile(UNFINISHED + re.escape(path.name))
    return [other for other in path.parent.iterdir() if name.fullmatch(other.name)]


def _flush(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_is_writing = contextvars.ContextVar("is_writing", default=False)


def is_writing() -> bool:
    """Whether this worker is writing in `save_model` or `save_weights`."""
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
    """Turn an error of writing into an error on all workers."""
    try:
        with hdf5.as_os_errors(path):
            yield
    except OSError as error:
        if not consensus.is_multi_worker(strategy):
            raise
        raise consensus.worker_failure(
            strategy, f"could not save {str(path)!r}: {error}"
        ) from error


def is_one_path(strategy: tf.distribute.Strategy, filepath: Any) -> bool:
    """Whether all workers write to the same local path; call it on every worker."""
    path = os.path.realpath(filepath) if is_local(filepath) else ""
    paths = set(consensus.exchange_texts(strategy, path, "save").values())
    return bool(path) and len(paths) == 1 and _is_one_disk(strategy, path)


def is_local(filepath: Any) -> bool:
    """Whether this is a path, and not a URL such as `gs://...`."""
    return isinstance(filepath, (str, os.PathLike)) and "://" not in str(filepath)


def _is_one_disk(strategy: tf.distribute.Strategy, path: str) -> bool:
    """Whether all workers see the same directory; each creates a file in it."""
    directory = pathlib.Path(path.partition("{")[0]).parent
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".tf_dgc_", dir=directory) as file:
        names = consensus.exchange_texts(strategy, file.name, "save").values()
        sees_all = str(all(map(os.path.exists, names)))
        answers = consensus.exchange_texts(strategy, sees_all, "save").values()
        return "False" not in answers


@contextlib.contextmanager
def checkpoint_directory(
    strategy: tf.distribute.Strategy, directory: Path
) -> Iterator[str]:
    """Yield the directory in which this worker must write TensorFlow checkpoints.

    `tf.train.Checkpoint` writes on every worker. The paths must differ, and only one
    copy is needed: the first worker gets `directory`, the others temporary directories.
    All restore from `directory`:

    >>> checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    >>> checkpoint.restore(tf.train.latest_checkpoint("checkpoints"))
    >>> with tf_dgc.saving.checkpoint_directory(strategy, "checkpoints") as path:
    ...     manager = tf.train.CheckpointManager(checkpoint, path, max_to_keep=2)
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
