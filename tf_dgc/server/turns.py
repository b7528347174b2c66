"""Turns: optimizers of one process take part one after the other, each in a run."""

from collections.abc import Sequence

from tf_dgc.server.heartbeat import Heartbeat
from tf_dgc.server.tasks import Task

LEFT = (
    "This `ServerOptimizer` takes part no longer: another one of the same process has "
    "begun to train, or `leave` was called. Of a process one trains at a time: to "
    "train this model on, compile it with a new one; for a model with several "
    "optimizers, as a GAN, use `DGCOptimizer`, without a server."
)
"""What is said to an optimizer whose run is over."""

_last: dict[Task, tuple[int, Sequence[Heartbeat]]] = {}


def next_run(task: Task) -> int:
    """Return the number of the run of the optimizer that takes part next, from 0.

    Args:
        task: task of this process, a worker.
    """
    return _last[task][0] + 1 if task in _last else 0


def begin(task: Task, run: int, heartbeats: Sequence[Heartbeat]) -> None:
    """Note that an optimizer has joined, by which servers know that the last one left.

    Args:
        task: task of this process, a worker.
        run: number of its run.
        heartbeats: its signs of life, to each server.
    """
    _, before = _last.get(task, (0, ()))
    for heartbeat in before:
        heartbeat.stop()
    _last[task] = run, heartbeats
