"""The cluster of a Slurm job step, as `TF_CONFIG`."""

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

_FIRST_PORT, _PORTS = 15000, 10000


def from_slurm(port: int | None = None) -> dict[str, Any]:
    """Set `TF_CONFIG` from the variables of `srun`: a worker for each task.

    Call it before `tf_dgc.multi_worker_strategy()`:

    >>> tf_dgc.cluster.from_slurm()
    >>> strategy = tf_dgc.multi_worker_strategy()

    Args:
        port: first port that the workers of a node listen on, one each; None for one
            derived from the job's number, 15000 to 24999. Two steps of one job that
            share a node need ports of their own.

    Returns:
        The value of `TF_CONFIG`, as a dictionary.

    Raises:
        ValueError: outside of a job step, if tasks are not distributed over nodes by
            block or cyclically, or if `TF_CONFIG` already has another value.
    """
    config = config_of(os.environ, port)
    text = os.environ.get("TF_CONFIG", "").strip()
    if text and text != json.dumps(config):
        raise ValueError(
            "`from_slurm` sets the environment variable TF_CONFIG, which already has "
            f"another value: unset it. Received: {text}"
        )
    os.environ["TF_CONFIG"] = json.dumps(config)
    return config


def config_of(
    environment: Mapping[str, str], port: int | None = None
) -> dict[str, Any]:
    """Return the cluster and task of Slurm's variables, as `from_slurm`."""
    rank = int(_get(environment, "SLURM_PROCID"))
    nodes = hosts(_get(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    tasks = _numbers(
        _get(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    )
    if len(tasks) != len(nodes):
        raise ValueError(
            "Slurm's variables must have a number of tasks for each node. "
            f"Received: nodes={nodes}, tasks of each={tasks}"
        )
    if port is None:
        port = _FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % _PORTS
    order = _order(tasks, environment.get("SLURM_DISTRIBUTION", "block"))
    workers = [f"{nodes[node]}:{port + index}" for node, index in order]
    task = {"type": "worker", "index": rank}
    return {"cluster": {"worker": workers}, "task": task}


def _order(tasks: list[int], distribution: str) -> Iterator[tuple[int, int]]:
    """Yield each rank's node and index on it; `tasks` has the number of each node."""
    over_nodes = re.split("[:,]", distribution.lower())[0]
    if over_nodes in ("block", "*", ""):
        for node, number in enumerate(tasks):
            yield from ((node, index) for index in range(number))
    elif over_nodes == "cyclic":
        for index in range(max(tasks)):
            yield from ((n, index) for n, number in enumerate(tasks) if index < number)
    else:
        raise ValueError(
            "Tasks must be distributed over nodes by block or cyclically, as by `srun "
            f"--distribution=block`. Received: SLURM_DISTRIBUTION={distribution}"
        )


def hosts(text: str) -> list[str]:
    """Return the names of a node list such as "a,node[01-03,7],rack[1-2]n[1-2]"."""
    parts = re.findall(r"(?:[^,\[\]]|\[[0-9,-]+\])+", text)
    if ",".join(parts) != text:
        raise ValueError(
            "A node list must have Slurm's form, for example 'node[01-03,7]'. It comes "
            "from SLURM_STEP_NODELIST or SLURM_JOB_NODELIST: let Slurm set them. "
            f"Received: {text!r}"
        )
    return [name for part in parts for name in _names(part)]


def _names(part: str) -> Iterator[str]:
    segments = re.split(r"\[([^]]*)\]", part)
    choices = [
        list(_range(segment)) if i % 2 else [segment]
        for i, segment in enumerate(segments)
    ]
    return map("".join, itertools.product(*choices))


def _range(text: str) -> Iterator[str]:
    """Yield the numbers of "01-03,7", zero-padded like the first of each range."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"


def _numbers(text: str) -> list[int]:
    """Return the numbers of "2(x3),1", which is [2, 2, 2, 1]."""
    numbers = []
    for part in text.split(","):
        number, _, times = part.rstrip(")").partition("(x")
        numbers += [int(number)] * int(times or 1)
    return numbers


def _get(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return environment[name]
    raise ValueError(
        "`from_slurm` is for processes that `srun` started, and reads the cluster from "
        "Slurm's variables; without Slurm, use `tf-dgc run` or set TF_CONFIG. "
        f"{names[0]} is not set."
    )
