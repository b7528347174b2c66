"""The cluster of a Slurm job step, as `TF_CONFIG`."""

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

_FIRST_PORT, _PORTS = 15000, 10000


def from_slurm(port: int | None = None) -> dict[str, Any]:
    """Set `TF_CONFIG` from what `srun` tells this process: a worker for each task.

    Call it before `tf_dgc.multi_worker_strategy()`:

    >>> tf_dgc.cluster.from_slurm()
    >>> strategy = tf_dgc.multi_worker_strategy()

    Args:
        port: first port that the workers of a node listen on, one each; None for one
            that follows from the number of the job, 15000 to 24999. Two steps of one
            job that share a node need ports of their own.

    Returns:
        What `TF_CONFIG` is now, as a dictionary.

    Raises:
        ValueError: outside of a job step, for tasks that are spread over nodes in
            another way than by block or cyclically, and if `TF_CONFIG` says something
            else already.
    """
    config = config_of(os.environ, port)
    text = os.environ.get("TF_CONFIG", "").strip()
    if text and text != json.dumps(config):
        raise ValueError(
            "`from_slurm` sets the environment variable TF_CONFIG, which is there "
            f"already and says something else: unset it. Received: {text}"
        )
    os.environ["TF_CONFIG"] = json.dumps(config)
    return config


def config_of(found: Mapping[str, str], port: int | None = None) -> dict[str, Any]:
    """Return the cluster and the task that Slurm's variables say.

    Args:
        found: environment variables of a task.
        port: see `from_slurm`.

    Raises:
        ValueError: see `from_slurm`.
    """
    rank = int(_get(found, "SLURM_PROCID"))
    nodes = hosts(_get(found, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    tasks = _numbers(_get(found, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if len(tasks) != len(nodes):
        raise ValueError(
            "Slurm's variables must have a number of tasks for each node. "
            f"Received: nodes={nodes}, tasks of each={tasks}"
        )
    if port is None:
        port = _FIRST_PORT + int(found.get("SLURM_JOB_ID", "0")) % _PORTS
    order = _order(tasks, found.get("SLURM_DISTRIBUTION", "block"))
    workers = [f"{nodes[node]}:{port + place}" for node, place in order]
    task = {"type": "worker", "index": rank}
    return {"cluster": {"worker": workers}, "task": task}


def _order(tasks: list[int], distribution: str) -> Iterator[tuple[int, int]]:
    """Yield of each rank its node, and its place there.

    Args:
        tasks: number of tasks of each node.
        distribution: value of `srun --distribution`; parts behind the first are about
            sockets and cores.
    """
    over_nodes = re.split("[:,]", distribution.lower())[0]
    if over_nodes in ("block", "*", ""):
        for node, number in enumerate(tasks):
            yield from ((node, place) for place in range(number))
    elif over_nodes == "cyclic":
        for place in range(max(tasks)):
            yield from ((n, place) for n, number in enumerate(tasks) if place < number)
    else:
        raise ValueError(
            "Tasks must be spread over nodes by block or cyclically, as by `srun "
            f"--distribution=block`. Received: SLURM_DISTRIBUTION={distribution}"
        )


def hosts(text: str) -> list[str]:
    """Return the names of a node list, as `scontrol show hostnames` does.

    Args:
        text: list as Slurm abbreviates it: "a,node[01-03,7],rack[1-2]n[1-2]".

    Raises:
        ValueError: if it is none.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[0-9,-]+\])+", text)
    if ",".join(parts) != text:
        raise ValueError(f"A node list must be as Slurm writes it. Received: {text!r}")
    return [name for part in parts for name in _names(part)]


def _names(part: str) -> Iterator[str]:
    pieces = re.split(r"\[([^]]*)\]", part)
    choices = [
        list(_range(piece)) if i % 2 else [piece] for i, piece in enumerate(pieces)
    ]
    return map("".join, itertools.product(*choices))


def _range(text: str) -> Iterator[str]:
    """Yield the numbers of "01-03,7", with as many digits as the first of each."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"


def _numbers(text: str) -> list[int]:
    """Return the numbers of "2(x3),1"."""
    found = []
    for part in text.split(","):
        number, _, times = part.rstrip(")").partition("(x")
        found += [int(number)] * int(times or 1)
    return found


def _get(found: Mapping[str, str], *names: str) -> str:
    """Return the first of some variables that is there."""
    for name in names:
        if found.get(name):
            return found[name]
    raise ValueError(
        "`from_slurm` is for processes that `srun` started, and finds there who takes "
        "part; without Slurm, use `tf-dgc run` or set TF_CONFIG. "
        f"{names[0]} is not set."
    )
