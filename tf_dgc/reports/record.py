"""The record of a run: what a report is made of, as a file of JSON."""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from tf_dgc.checkpoint.saving import replacing

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Variable:
    """What a step sends of one variable of the model.

    Attributes:
        name: path of the variable, "dense/kernel".
        optimizer: name of its optimizer; "" if the run has one.
        shape: shape of the variable.
        dense_bytes: number of bytes of its whole gradient.
        sent_bytes: number of bytes that one worker sends in the last step; None if that
            is known only while it runs.
    """

    name: str
    optimizer: str
    shape: tuple[int, ...]
    dense_bytes: int
    sent_bytes: int | None

    @property
    def layer(self) -> str:
        """Path of what the variable belongs to."""
        return self.name.rpartition("/")[0] or self.name


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What is known as an epoch ends. Totals are since the first epoch began.

    Attributes:
        epoch: number of the epoch, from 0.
        logs: logs by name; None in place of what is not finite.
        steps: number of steps; None if nobody counted.
        sent_bytes: number of bytes that a worker sent, likewise.
        dense_bytes: number of bytes that a dense all-reduce would have sent, likewise.
        seconds: number of seconds, validation included, likewise.
    """

    epoch: int
    logs: dict[str, float | None]
    steps: int | None = None
    sent_bytes: int | None = None
    dense_bytes: int | None = None
    seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of `fit`, up to its last complete epoch.

    Attributes:
        model: name of the model.
        workers: number of workers; None if it is not known.
        versions: versions by name of what it ran with.
        methods: dictionaries of each optimizer, by name: "name", "exchange" and
            "settings" (its config).
        variables: variables of the model that are trained.
        epochs: epochs in order.
    """

    model: str
    workers: int | None
    versions: dict[str, str]
    methods: dict[str, dict[str, Any]]
    variables: list[Variable]
    epochs: list[Epoch]


def write(run: Run, path: str | os.PathLike) -> None:
    """Write a record, complete or not at all.

    Args:
        run: record to write.
        path: path of the file, whose place it takes.

    Raises:
        OSError: if it cannot be written.
    """
    content = {"format": FORMAT, **dataclasses.asdict(run)}
    text = json.dumps(content, indent=1, default=_plain)
    with replacing(pathlib.Path(path)) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")


def _plain(setting: Any) -> Any:
    """Return what JSON has for a setting that is no number, text or list of Python's.

    Optimizers take whatever Keras does, and a record is read by people.
    """
    value = setting.numpy() if hasattr(setting, "numpy") else setting  # of tensors
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def read(path: str | os.PathLike) -> Run:
    """Read a record.

    Raises:
        ValueError: for a file that is none.
        OSError: if it cannot be read.
    """
    try:
        found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise ValueError("another format")
        variables = [Variable(**v) for v in found.pop("variables")]
        epochs = [_checked(Epoch(**e)) for e in found.pop("epochs")]
        return Run(**found, variables=variables, epochs=epochs)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "A record must be a file that `CompressionMonitor(path=...)` of this "
            f"version wrote. Received: {os.fspath(path)!r} ({error})"
        ) from error


def _checked(epoch: Epoch) -> Epoch:
    numbers = [epoch.epoch, epoch.steps, epoch.sent_bytes, epoch.seconds]
    for number in [*numbers, *epoch.logs.values()]:
        if number is not None and not isinstance(number, int | float):
            raise TypeError(f"{number!r} is no number")
    return epoch


def finite(logs: dict[str, Any]) -> dict[str, float | None]:
    """Return the numbers among logs, None in place of those that are not finite."""
    found = {}
    for name, value in logs.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        found[name] = number if math.isfinite(number) else None
    return found
