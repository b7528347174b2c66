"""Private Keras and TensorFlow names for saving and its end."""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from tensorflow.python.training.saving import saveable_object


class Saving:
    """A call that writes a file or a checkpoint, or reads one.

    Attributes:
        path: the argument of the call; None if it is no path.
    """

    def __init__(self, path: Any):
        self.path = str(path) if isinstance(path, (str, os.PathLike)) else None
        self._calls: list[Callable[[BaseException | None], None]] = []

    def call_at_end(self, call: Callable[[BaseException | None], None]) -> None:
        """Call a function, once, with the error or None when the call has ended."""
        if not self._calls:
            self._calls.append(call)

    def end(self, error: BaseException | None) -> None:
        """Call the function of `call_at_end`."""
        for call in self._calls:
            call(error)


class _Running(threading.local):
    def __init__(self) -> None:
        self.stack: dict[str, list[Saving]] = {name: [] for name in _FUNCTIONS}


def saving_of(kind: str) -> Saving | None:
    """Return what this thread is saving, the outermost call of a kind, or None.

    Kinds are "keras" (a `.keras` file, its folder, or weights), "hdf5" (a whole model
    in the old format), "checkpoint" (`tf.train.Checkpoint` writes) and "restore".
    """
    stack = _running.stack[kind]
    return stack[0] if stack else None


# By kind, functions and the name of the argument that is the path.
_FUNCTIONS: dict[str, list[tuple[Any, str, str]]] = {
    "keras": [
        (saving_lib, "save_model", "filepath"),
        (saving_lib, "save_weights_only", "filepath"),
    ],
    "hdf5": [(legacy_h5_format, "save_model_to_hdf5", "filepath")],
    "checkpoint": [
        (tf.train.Checkpoint, "write", "file_prefix"),
        (tf.train.Checkpoint, "save", "file_prefix"),
        (tf.train.CheckpointManager, "save", "checkpoint_number"),
    ],
    "restore": [
        (tf.train.Checkpoint, "read", "save_path"),
        (tf.train.Checkpoint, "restore", "save_path"),
    ],
}
_running = _Running()


def _wrap(owner: Any, name: str, path_name: str, kind: str) -> None:
    """Let a function note while it runs that it does."""
    stock = getattr(owner, name)
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def save(*args: Any, **kwargs: Any) -> Any:
        try:
            path = signature.bind(*args, **kwargs).arguments.get(path_name)
        except TypeError:
            return stock(*args, **kwargs)  # raises its own error
        saving = Saving(path)
        stack = _running.stack[kind]
        stack.append(saving)
        try:
            result = stock(*args, **kwargs)
        except BaseException as error:
            stack.remove(saving)
            saving.end(error)
            raise
        stack.remove(saving)
        saving.end(None)
        return result

    save._tf_dgc_wrapped = True  # type: ignore[attr-defined]
    setattr(owner, name, save)


def wrap_saving() -> None:
    """Wrap the functions that save, once a process, for `saving_of`."""
    for kind, functions in _FUNCTIONS.items():
        for owner, name, path_name in functions:
            if not hasattr(getattr(owner, name), "_tf_dgc_wrapped"):
                _wrap(owner, name, path_name, kind)


class SavedNote(tf.__internal__.tracking.AutoTrackable):
    """Numbers in a checkpoint that `check` receives when it is restored."""

    def __init__(
        self, numbers: Callable[[], list[int]], check: Callable[[list[int]], None]
    ):
        super().__init__()
        self._numbers, self._check = numbers, check

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_REMARK: tf.constant(self._numbers(), tf.int64)}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        if tf.executing_eagerly():  # not while a SavedModel traces its restoration
            self._check(restored_tensors[_REMARK].numpy().tolist())


_REMARK = "REMARK"


class CheckpointHooks(keras.optimizers.Optimizer):
    """Calls methods of an optimizer before it is saved or restored by TensorFlow."""

    # TensorFlow calls `_trackable_children` of every object first.

    def in_checkpoint(self) -> None:
        """Run before a checkpoint reads anything."""
        raise NotImplementedError

    def in_restoring(self) -> None:
        """Run before anything is restored."""

    def in_saved_model(self) -> None:
        """Run before a SavedModel reads anything."""

    def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
        self.in_restoring()
        return super()._lookup_dependency(*args, **kwargs)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type == "savedmodel":
            self.in_saved_model()
        else:
            self.in_checkpoint()
        return super()._trackable_children(save_type, **kwargs)


def read_when_saved(read: Callable[[], Any], dtype: str, device: str) -> Any:
    """Return a value for `_serialize_to_tensors` that is read only when it is saved."""
    # Restoring calls it too, for names and dtypes only (`saveable_object.SaveSpec`).
    return saveable_object.SaveSpec(
        lambda: tf.constant(read()), "", "", tf.as_dtype(dtype), device
    )


def join_save(model: keras.Model) -> None:
    """Read what Keras reads to save a model, in its order, and write nothing."""
    _save_state(model, _NoStore())


def save_weights(model: keras.Model, file: Any, check: Callable[[], None]) -> None:
    """Save weights as `save_weights_only` does, to an open `h5py.File`.

    `check` is called after every value.
    """
    _save_state(model, _OpenFileStore(file, check))


def _save_state(model: keras.Model, store: saving_lib.H5IOStore) -> None:
    saving_lib._save_state(
        model,
        weights_store=store,
        assets_store=None,
        inner_path="",
        visited_saveables=set(),
    )


class _NoStore(saving_lib.H5IOStore):
    def __init__(self) -> None:
        pass  # the base class would open a file

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> "_NoStore":
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        pass


class _OpenFileStore(saving_lib.H5IOStore):
    """A store in a file that others open and close."""

    def __init__(self, file: Any, check: Callable[[], None]):
        self._file, self._check = file, check
        super().__init__("", mode="w")

    def _get_h5_file(self, path_or_io: Any, mode: str | None = None) -> Any:
        return self._file

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._check()


class ModelCheckpointHooks(keras.callbacks.ModelCheckpoint):
    """Calls `write` where Keras's callback saves (`_save_model`)."""

    def write(self, path: str) -> None:
        """Save to `path`."""
        raise NotImplementedError

    def logs_of_all(self, logs: Any) -> Any:
        """Return logs that are the same on all workers, from those within an epoch."""
        return logs

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if batch is not None:
            logs = self.logs_of_all(logs)
        path = self._get_file_path(epoch, batch, logs)
        if self._should_save_model(epoch, batch, logs, path):
            self.write(path)
