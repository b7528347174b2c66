"""A backup: Keras's weights file, with where training was beside the weights."""

import pathlib
import uuid
from typing import Any, NamedTuple

import h5py
import keras

_GROUP = "tf_dgc_backup"


class Backup(NamedTuple):
    """Where training was, beside weights and state of the optimizer.

    Attributes:
        name: name drawn by chance, to tell backups apart.
        epoch: number of the epoch to go on with, from 0.
        batches: number of this epoch's batches that are done.
        streams: states of the layers' random streams, which Keras does not save.
        metrics: values of the model's metric variables, if batches are done.
    """

    name: str
    epoch: int
    batches: int
    streams: list[Any]
    metrics: list[Any]


def make(model: keras.Model, epoch: int, batches: int) -> Backup:
    """Return where `model` is; call it on every worker."""
    metrics = model.metrics_variables if batches else []
    return Backup(
        uuid.uuid4().hex,
        epoch,
        batches,
        [v.numpy() for v in random_streams(model)],
        [v.numpy() for v in metrics],
    )


def random_streams(model: keras.Model) -> list[keras.Variable]:
    """Return the states of `keras.random.SeedGenerator`s, as of `Dropout`."""
    return [v for v in model.variables if v.name == "seed_generator_state"]


def write(model: keras.Model, backup: Backup, path: pathlib.Path) -> None:
    """Write a file that is not there yet."""
    model.save_weights(path)
    with h5py.File(path, "r+") as file:
        group = file.create_group(_GROUP)
        group.attrs["name"] = backup.name
        group.attrs["epoch"] = backup.epoch
        group.attrs["batches"] = backup.batches
        for kind in ("streams", "metrics"):
            values = group.create_group(kind)
            for i, value in enumerate(getattr(backup, kind)):
                values.create_dataset(str(i), data=value)


def read(path: pathlib.Path) -> Backup:
    """Return what was written beside the weights.

    Raises:
        OSError: if the file is not complete.
        KeyError: if it is no backup.
    """
    with h5py.File(path, "r") as file:
        group = file[_GROUP]
        streams, metrics = (
            [group[kind][str(i)][()] for i in range(len(group[kind]))]
            for kind in ("streams", "metrics")
        )
        epoch, batches = (int(group.attrs[name]) for name in ("epoch", "batches"))
        return Backup(str(group.attrs["name"]), epoch, batches, streams, metrics)
