"""Private Keras and TensorFlow names for saving and its end."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Container
from types import CodeType, FrameType
from typing import Any

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from tensorflow.python.training.saving import saveable_object

from tf_dgc._internals import keras_trainer

# Functions of Keras that save, and the local variable that each closes last.
_CLOSED_LAST = {
    saving_lib._save_model_to_fileobj.__code__: "zf",
    saving_lib._save_model_to_dir.__code__: "asset_store",
    saving_lib.save_weights_only.__code__: "weights_store",
}


def closed_last() -> Any | None:
    """Return the zip file or store that Keras, among our callers, closes last."""
    frame = _caller(_CLOSED_LAST)
    return None if frame is None else frame.f_locals[_CLOSED_LAST[frame.f_code]]


def is_saving_hdf5() -> bool:
    """Whether Keras is writing a whole model as HDF5 among our callers."""
    return _caller({legacy_h5_format.save_model_to_hdf5.__code__}) is not None


def call_when_closed(file: Any, call: Callable[[BaseException | None], None]) -> None:
    """Call once, with the error or None, when a file or store has been closed."""
    if "close" in vars(file):
        return
    before = sys.exc_info()[1]  # a program may save because of an error

    def close() -> None:
        del file.close
        error = sys.exc_info()[1]
        try:
            file.close()
        except OSError as close_error:
            call(close_error)
            raise
        call(None if error is before else error)

    file.close = close


def call_when_checkpoint_is_written(call: Callable[[], None]) -> None:
    """Call a function when the `tf.train.Checkpoint` among our callers is written."""
    # The manager's record is written before (`Checkpoint._write`). Does nothing without
    # a checkpoint, or if it is written asynchronously.
    frame = _caller({tf.train.Checkpoint._write.__code__})
    options = None if frame is None else frame.f_locals["options"]
    if options is None or options.experimental_enable_async_checkpoint:
        return
    before = options.experimental_write_callbacks or []
    if any(isinstance(callback, _OneCallback) for callback in before):
        return
    options.experimental_write_callbacks = [
        *before,
        _OneCallback(options, before, call),
    ]


def is_checkpointing() -> bool:
    """Whether a `tf.train.Checkpoint` is being written or read among our callers."""
    return _caller(_CHECKPOINTING) is not None


def is_saving_saved_model() -> bool:
    """Whether a SavedModel is being written among our callers."""
    return _caller({inspect.unwrap(tf.saved_model.save).__code__}) is not None


_CHECKPOINTING = {
    inspect.unwrap(getattr(tf.train.Checkpoint, name)).__code__
    for name in ("_write", "read", "restore")
}


class _OneCallback:
    """Calls a function once, and removes itself from the options."""

    def __init__(self, options: Any, before: list, call: Callable[[], None]):
        self._options, self._before, self._call = options, before, call

    def __call__(self) -> None:
        self._options.experimental_write_callbacks = self._before
        self._call()


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


def call_when_fit_begins(
    model: keras.Model, call: Callable[[keras.callbacks.CallbackList], None]
) -> None:
    """Call a function before the callbacks of every `fit` (`make_train_function`)."""
    stock = model.make_train_function

    def make_train_function(force: bool = False) -> Any:
        function = stock(force)
        callbacks = keras_trainer.callbacks_of_calling_fit()
        if callbacks is not None:
            call(callbacks)
        return function

    model.make_train_function = make_train_function


def _caller(codes: Container[CodeType]) -> FrameType | None:
    """Return the innermost of our callers that runs one of these codes."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_code in codes:
            return frame
    return None


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


def path_being_saved() -> str | None:
    """Return the path that Keras is saving to, if it is among our callers."""
    frame = _caller(
        {saving_lib.save_model.__code__, saving_lib.save_weights_only.__code__}
    )
    path = None if frame is None else frame.f_locals["filepath"]
    return str(path) if isinstance(path, (str, os.PathLike)) else None


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
