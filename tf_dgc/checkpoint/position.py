"""The position of a training, and the file that has it, with what all have alike."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import h5py
import keras
import numpy as np

from tf_dgc._internals import stores
from tf_dgc.checkpoint import hdf5

_GROUP = "tf_dgc_backup"
_MODEL = "tf_dgc_model"
_NAMED = 8  # variables that differ; more are counted


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
        # A dataset, as HDF5's attributes hold no more than 64 kB.
        text = json.dumps(describe(model)).encode()
        writing.file.create_dataset(_MODEL, data=np.frombuffer(text, np.uint8))
        writing.check()


def read(path: pathlib.Path) -> Position:
    """Return the position that `write` was given."""
    with h5py.File(path, "r") as file:
        group = file[_GROUP]
        metrics = [group[str(i)][()] for i in range(len(group))]
        epoch, batches = (int(group.attrs[name]) for name in ("epoch", "batches"))
    return Position(epoch, batches, metrics)


def describe(model: keras.Model) -> dict[str, Any]:
    """Return the weights of a model, each by path, shape and dtype, and its optimizer.

    Without seeds and metrics, which a model creates while it trains.
    """
    optimizer = model.optimizer
    text = repr(optimizer)
    if " object at 0x" in text:
        text = type(optimizer).__name__
    weights = [[v.path, list(v.shape), v.dtype] for v in model.weights]
    return {"weights": weights, "optimizer": text}


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """Return what `describe` said of the model that was written; empty if it is old."""
    with h5py.File(path, "r") as file:
        if _MODEL not in file:
            return {}
        return json.loads(file[_MODEL][()].tobytes())


def differences(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Return how a model differs from the one that was saved, a line for each weight.

    Keras numbers layers without a name, so paths may differ where models do not: two
    models are alike if shapes and dtypes are, in order or by path.

    Args:
        saved: description of the model that was saved, empty if it is not known.
        own: description of the model that is to be loaded.
    """
    if not saved:
        return []
    before, now = saved["weights"], own["weights"]
    forms_before = {path: form for path, *form in before}
    forms_now = {path: form for path, *form in now}
    in_order = [form for _, *form in before] == [form for _, *form in now]
    if in_order or forms_before == forms_now:
        return []
    if len(before) == len(now):
        pairs = zip(before, now, strict=True)
        lines = [
            _difference(path, form, other)
            for (path, *form), (_, *other) in pairs
            if form != other
        ]
    else:
        lines = [f"{len(before)} weights in the backup, {len(now)} in this model"]
        for path, form in {**forms_before, **forms_now}.items():
            there, here = forms_before.get(path), forms_now.get(path)
            if there is None or here is None:
                where = "the backup" if here is None else "this model"
                lines.append(f"{path}: {_say(form)} in {where} alone")
            elif there != here:
                lines.append(_difference(path, there, here))
    if len(lines) > _NAMED:
        lines = [*lines[:_NAMED], f"and {len(lines) - _NAMED} more"]
    return lines


def _difference(path: str, saved: Sequence[Any], own: Sequence[Any]) -> str:
    return f"{path}: {_say(saved)} in the backup, {_say(own)} in this model"


def _say(form: Sequence[Any]) -> str:
    shape, dtype = form
    return f"{dtype} {tuple(shape)}"
