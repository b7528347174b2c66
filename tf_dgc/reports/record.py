"""The record of a run: what a report is made of, as a file of JSON."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tf_dgc.multiworker.saving import replacing

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class VariableRecord:
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
class EpochRecord:
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
class RunRecord:
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
    variables: list[VariableRecord]
    epochs: list[EpochRecord]


def write_record(run: RunRecord, path: str | os.PathLike) -> None:
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


def read_record(path: str | os.PathLike) -> RunRecord:
    """Read a record.

    Raises:
        ValueError: for a file that is none.
        OSError: if it cannot be read.
    """
    try:
        found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise ValueError("another format")
        variables = [VariableRecord(**v) for v in found.pop("variables")]
        epochs = [_checked(EpochRecord(**e)) for e in found.pop("epochs")]
        return RunRecord(**found, variables=variables, epochs=epochs)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "A record must be a file that `CompressionMonitor(path=...)` of this "
            f"version wrote. Received: {os.fspath(path)!r} ({error})"
        ) from error


def _checked(epoch: EpochRecord) -> EpochRecord:
    numbers = [epoch.epoch, epoch.steps, epoch.sent_bytes, epoch.seconds]
    for number in [*numbers, *epoch.logs.values()]:
        if number is not None and not isinstance(number, int | float):
            raise TypeError(f"{number!r} is no number")
    return epoch


def finite_or_none(logs: dict[str, Any]) -> dict[str, float | None]:
    """Return the numbers among logs, None in place of those that are not finite."""
    found = {}
    for name, value in logs.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        found[name] = number if math.isfinite(number) else None
    return found


# --- A directory of Keras's `TensorBoard` callback, as a run.

_TRAIN, _VALIDATION = "train", "validation"
_EPOCH = "epoch_"


def read_logdir(path: str | os.PathLike) -> RunRecord:
    """Read what was logged at the ends of epochs.

    Of an epoch that was logged twice, the later one counts. Bytes and steps are there
    if `CompressionMonitor` stood before `TensorBoard` in the list of callbacks.

    Args:
        path: path of the directory, which has "train" in it.

    Raises:
        ImportError: if tensorboard is not installed.
        ValueError: if nothing is there of an epoch's end.
    """
    directory = pathlib.Path(path)
    logs: dict[int, dict[str, float]] = {}
    ends: dict[int, float] = {}
    begun: list[float] = []
    for part, prefix in ((_TRAIN, ""), (_VALIDATION, "val_")):
        for name, epoch, value, at in _scalars(directory / part, begun):
            logs.setdefault(epoch, {})[prefix + name] = value
            ends[epoch] = max(at, ends.get(epoch, at)) if prefix else at
    if not logs:
        raise ValueError(
            "A directory must be one that `keras.callbacks.TensorBoard` wrote while "
            f"`fit` ended an epoch at least: it has {_TRAIN!r} in it. "
            f"Received: {os.fspath(path)!r}"
        )
    epochs = [
        _epoch(number, logs[number], ends[number] - min(begun))
        for number in sorted(logs)
    ]
    return RunRecord(directory.resolve().name, None, {}, {}, [], epochs)


def _scalars(
    directory: pathlib.Path, begun: list[float]
) -> Iterator[tuple[str, int, float, float]]:
    """Yield name, epoch, value and time of what was logged, the earlier first.

    Args:
        directory: directory of event files.
        begun: times of the first event, to which one is added.
    """
    if not directory.is_dir():
        return
    found = _accumulator(directory)
    if not found.Tags()["tensors"]:
        return
    begun.append(found.FirstEventTimestamp())
    for tag in found.Tags()["tensors"]:
        if tag.startswith(_EPOCH):
            for event in found.Tensors(tag):
                value = _scalar(event.tensor_proto)
                if value is not None:
                    name = tag.removeprefix(_EPOCH)
                    yield name, event.step, value, event.wall_time


def _accumulator(directory: pathlib.Path) -> Any:
    try:
        from tensorboard.backend.event_processing import event_accumulator as events
    except ImportError as error:
        raise ImportError(
            "To read a directory of TensorBoard takes tensorboard: pip install "
            "'tf_dgc[report]'"
        ) from error
    everything = {events.TENSORS: 0}
    return events.EventAccumulator(str(directory), everything).Reload()


def _scalar(proto: Any) -> float | None:
    from tensorboard.util import tensor_util

    value = tensor_util.make_ndarray(proto)
    return float(value) if value.shape == () and value.dtype.kind in "fiu" else None


def _epoch(number: int, logs: dict[str, float], seconds: float) -> EpochRecord:
    """Return an epoch; bytes of several optimizers are added up, steps are the most."""
    sent, steps = _of_each(logs, "total_bytes"), _of_each(logs, "iterations")
    ratios = _of_each(logs, "total_compression_ratio")
    whole = [sent[k] * ratios[k] for k in sent if ratios.get(k)]
    return EpochRecord(
        number,
        finite_or_none(logs),
        round(max(steps.values())) if steps else None,
        round(sum(sent.values())) if sent else None,
        round(sum(whole)) if whole and len(whole) == len(sent) else None,
        seconds,
    )


def _of_each(logs: dict[str, float], name: str) -> dict[str, float]:
    """Return a log, or what several optimizers have of it, by what stands before it."""
    return {k.removesuffix(name): v for k, v in logs.items() if _is_of(k, name)}


def _is_of(key: str, name: str) -> bool:
    return key == name or key.endswith(f"_{name}")
