"""A directory of Keras's `TensorBoard` callback, as a run."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

from tf_dgc.reports.record import Epoch, Run, finite

_TRAIN, _VALIDATION = "train", "validation"
_EPOCH = "epoch_"


def read(path: str | os.PathLike) -> Run:
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
    return Run(directory.resolve().name, None, {}, {}, [], epochs)


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


def _epoch(number: int, logs: dict[str, float], seconds: float) -> Epoch:
    """Return an epoch; bytes of several optimizers are added up, steps are the most."""
    sent, steps = _of_each(logs, "total_bytes"), _of_each(logs, "iterations")
    ratios = _of_each(logs, "total_compression_ratio")
    whole = [sent[k] * ratios[k] for k in sent if ratios.get(k)]
    return Epoch(
        number,
        finite(logs),
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
