"""The record of a run: a JSON file from which reports are created."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class VariableRecord:
    """Size of one variable of the model."""

    name: str  # path of the variable, "dense/kernel"
    optimizer: str  # name of its optimizer; "" if the run has only one
    shape: tuple[int, ...]
    dense_bytes: int  # bytes of its whole gradient
    sent_bytes: int | None  # per worker, in the last step; None: run time

    @property
    def layer(self) -> str:
        """Path of the variable's layer."""
        return self.name.rpartition("/")[0] or self.name


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """The end of an epoch. Totals are since the first epoch began; None if unknown."""

    epoch: int  # number of the epoch, from 0
    logs: dict[str, float | None]  # logs by name; None for values that are not finite
    steps: int | None = None
    sent_bytes: int | None = None
    dense_bytes: int | None = None
    seconds: float | None = None  # seconds, including validation


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run of `fit`, up to its last complete epoch."""

    model: str
    workers: int | None  # number of workers; None if unknown
    versions: dict[str, str]
    methods: dict[str, dict[str, Any]]  # "name", "collective", "settings" by optimizer
    variables: list[VariableRecord]
    epochs: list[EpochRecord]


def write_record(run: RunRecord, path: str | os.PathLike) -> None:
    """Write a record atomically."""
    from tf_dgc.multiworker.saving import replacing  # reading needs no TensorFlow

    content = {"format": FORMAT, **dataclasses.asdict(run)}
    text = json.dumps(content, indent=1, default=_to_json)
    with replacing(pathlib.Path(path)) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _to_json(setting: Any) -> Any:
    """Return a JSON value for a setting of another type, which Keras may accept."""
    value = setting.numpy() if hasattr(setting, "numpy") else setting
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def read_record(path: str | os.PathLike) -> RunRecord:
    """Read a record; raise `ValueError` if it is invalid."""
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        variables = [VariableRecord(**v) for v in content.pop("variables")]
        epochs = [EpochRecord(**e) for e in content.pop("epochs")]
        for epoch in epochs:
            _check_numbers(epoch)
        return RunRecord(**content, variables=variables, epochs=epochs)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "A record must be a file that `CompressionMonitor(path=...)` of this "
            f"version wrote. Received: {os.fspath(path)!r} ({error})"
        ) from error


def _check_numbers(epoch: EpochRecord) -> None:
    numbers = [epoch.epoch, epoch.steps, epoch.sent_bytes, epoch.seconds]
    for number in [*numbers, *epoch.logs.values()]:
        if number is not None and not isinstance(number, int | float):
            raise TypeError(f"{number!r} is not a number")


def finite_or_none(logs: dict[str, Any]) -> dict[str, float | None]:
    """Return the numbers among logs, None for those that are not finite."""
    numbers = {}
    for name, value in logs.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        numbers[name] = number if math.isfinite(number) else None
    return numbers


_TRAIN, _VALIDATION = "train", "validation"
_EPOCH = "epoch_"


def read_logdir(path: str | os.PathLike) -> RunRecord:
    """Read a directory of Keras's `TensorBoard` callback, with "train", as a run."""
    # If an epoch was logged twice, the later one counts. Bytes and steps are present if
    # `CompressionMonitor` precedes `TensorBoard` in the list of callbacks.
    directory = pathlib.Path(path)
    logs: dict[int, dict[str, float]] = {}
    ends: dict[int, float] = {}
    begins: list[float] = []
    for part, prefix in ((_TRAIN, ""), (_VALIDATION, "val_")):
        for name, epoch, value, seconds in _scalars(directory / part, begins):
            logs.setdefault(epoch, {})[prefix + name] = value
            ends[epoch] = max(seconds, ends.get(epoch, seconds)) if prefix else seconds
    if not logs:
        raise ValueError(
            "A directory must be one to which `keras.callbacks.TensorBoard` logged at "
            f"least one epoch of `fit`, in {_TRAIN!r}. "
            f"Received: {os.fspath(path)!r}"
        )
    epochs = [
        _epoch(number, logs[number], ends[number] - min(begins))
        for number in sorted(logs)
    ]
    return RunRecord(directory.resolve().name, None, {}, {}, [], epochs)


def _scalars(
    directory: pathlib.Path, begins: list[float]
) -> Iterator[tuple[str, int, float, float]]:
    """Yield name, epoch, value and time of each log, in the order of time."""
    if not directory.is_dir():
        return
    events = _load_events(directory)
    if not events.Tags()["tensors"]:
        return
    begins.append(events.FirstEventTimestamp())
    for tag in events.Tags()["tensors"]:
        if tag.startswith(_EPOCH):
            for event in events.Tensors(tag):
                value = _scalar(event.tensor_proto)
                if value is not None:
                    name = tag.removeprefix(_EPOCH)
                    yield name, event.step, value, event.wall_time


def _load_events(directory: pathlib.Path) -> Any:
    try:
        from tensorboard.backend.event_processing import event_accumulator
    except ImportError as error:
        raise ImportError(
            "Reading a directory of TensorBoard needs tensorboard: pip install "
            "'tf_dgc[report]'"
        ) from error
    unlimited = {event_accumulator.TENSORS: 0}
    return event_accumulator.EventAccumulator(str(directory), unlimited).Reload()


def _scalar(proto: Any) -> float | None:
    from tensorboard.util import tensor_util

    value = tensor_util.make_ndarray(proto)
    return float(value) if value.shape == () and value.dtype.kind in "fiu" else None


def _epoch(number: int, logs: dict[str, float], seconds: float) -> EpochRecord:
    """Return an epoch, with the sum of the optimizers' bytes and their most steps."""
    sent = _per_optimizer(logs, "total_bytes")
    steps = _per_optimizer(logs, "iterations")
    ratios = _per_optimizer(logs, "total_compression_ratio")
    dense = [sent[k] * ratios[k] for k in sent if ratios.get(k)]
    return EpochRecord(
        number,
        finite_or_none(logs),
        round(max(steps.values())) if steps else None,
        round(sum(sent.values())) if sent else None,
        round(sum(dense)) if dense and len(dense) == len(sent) else None,
        seconds,
    )


def _per_optimizer(logs: dict[str, float], name: str) -> dict[str, float]:
    return {
        key.removesuffix(name): value
        for key, value in logs.items()
        if key == name or key.endswith(f"_{name}")
    }
