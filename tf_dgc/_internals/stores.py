"""Private names of what Keras and TensorFlow read and write to save."""

import inspect
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving import saving_lib
from tensorflow.python.training.saving import saveable_object


def read_when_saved(read: Callable[[], Any], dtype: str, device: str) -> Any:
    """Return what `_serialize_to_tensors` has to for a value that is costly to read.

    Restoring asks for the same, to know names and types, but does not read
    (`saveable_object.SaveSpec`).
    """
    return saveable_object.SaveSpec(
        lambda: tf.constant(read()), "", "", tf.as_dtype(dtype), device
    )


def take_part_in_saving(model: keras.Model) -> None:
    """Read whatever Keras reads to save a model, in its order, and write nothing.

    Values that all workers have to read together are read here while another worker
    saves (`saving_lib._save_state`).
    """
    saving_lib._save_state(
        model,
        weights_store=_Nowhere(),
        assets_store=None,
        inner_path="",
        visited_saveables=set(),
    )


class _Nowhere(saving_lib.H5IOStore):
    """A store without a file."""

    def __init__(self) -> None:
        pass  # the base class would open one

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> "_Nowhere":
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        pass


def save_weights(model: keras.Model, file: Any, check: Callable[[], None]) -> None:
    """Do what `save_weights` does, to a file that is open (`save_weights_only`).

    Args:
        model: Keras model, built.
        file: `h5py.File`, open to write.
        check: function that is called after every value.
    """
    saving_lib._save_state(
        model,
        weights_store=_InFile(file, check),
        assets_store=None,
        inner_path="",
        visited_saveables=set(),
    )


class _InFile(saving_lib.H5IOStore):
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
    """Return the path that Keras, somewhere among our callers, is saving to."""
    codes = (saving_lib.save_model.__code__, saving_lib.save_weights_only.__code__)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    path = None if frame is None else frame.f_locals["filepath"]
    return str(path) if isinstance(path, (str, os.PathLike)) else None


class ModelCheckpointSeam(keras.callbacks.ModelCheckpoint):
    """Keras's choice of when to save and where; `write` does it (`_save_model`)."""

    def write(self, path: str) -> None:
        """Save to `path`."""
        raise NotImplementedError

    def logs_of_all(self, logs: Any) -> Any:
        """Return logs that are the same on all workers, for those within an epoch."""
        return logs

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if batch is not None:
            logs = self.logs_of_all(logs)
        path = self._get_file_path(epoch, batch, logs)
        if self._should_save_model(epoch, batch, logs, path):
            self.write(path)
