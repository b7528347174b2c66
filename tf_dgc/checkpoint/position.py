"""The position of a training, and the file that has it, with what all have alike."""

import pathlib
from typing import Any, NamedTuple

import h5py
import keras

from tf_dgc._internals import stores
from tf_dgc.checkpoint import hdf5

_GROUP = "tf_dgc_backup"


class Position(NamedTuple):
    """Where training was.

    Attributes:
        epoch: number of the epoch to go on with, from 0.
        batches: number of this epoch's batches that are done.
        metrics: values of the model's metric variables, if batches are done.
    """

    epoch: int
    batches: int
    metrics: list[Any]


def position(model: keras.Model, epoch: int, batches: int) -> Position:
    """Return where `model` is; call it on every worker."""
    metrics = model.metrics_variables if batches else []
    return Position(epoch, batches, [v.numpy() for v in metrics])


def write(model: keras.Model, now: Position, name: str, path: pathlib.Path) -> None:
    """Write the weights of a model, as Keras does, and where its training is.

    Args:
        model: Keras model, built.
        now: position of the training.
        name: name of the backup that the file belongs to.
        path: path of the file.

    Raises:
        OSError: if the disk does not take all of it.
    """
    with hdf5.writing(path) as writing:
        writing.file.attrs["backup"] = name
        stores.save_weights(model, writing.file, writing.check)
        group = writing.file.create_group(_GROUP)
        group.attrs["epoch"] = now.epoch
        group.attrs["batches"] = now.batches
        for i, value in enumerate(now.metrics):
            group.create_dataset(str(i), data=value)


def read(path: pathlib.Path) -> Position:
    """Return the position that `write` was given."""
    with h5py.File(path, "r") as file:
        group = file[_GROUP]
        metrics = [group[str(i)][()] for i in range(len(group))]
        epoch, batches = (int(group.attrs[name]) for name in ("epoch", "batches"))
    return Position(epoch, batches, metrics)
