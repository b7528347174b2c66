"""The runs of `server_training.py`, and comparisons with the dense run."""

import dataclasses
import itertools
import math
import pathlib

from common import server_runs
from tasks import small

_WORKER = pathlib.Path(__file__).parents[1] / "workers" / "server_training_worker.py"
MODES = ["dense", "dgc", *server_runs.SERVED]
INNERS = ["sgd", "adam"]
KEYS = [
    *("inner", "workers", "speed", "rate", "mode", "seed", "steps", "step_ms"),
    *("batch_size", "width", "learning_rate", "sparsity", "factor_masking"),
    *("pull", "pull_sparsity", "staleness", "quorum", "every"),
]
_DENSE_KEYS = ["inner", "workers", "rate", "steps", "batch_size", "width", "step_ms"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings that all runs have in common.

    Attributes:
        folder: folder of `digits.prepare`.
        steps: mean number of gradients per worker.
        step_ms: step time without the update, for a worker at full speed.
        batch_size: examples per step and worker.
        width: units of each hidden layer.
        learning_rates: rates by inner optimizer, for steps that sum all workers.
        sparsity: sparsity of pushes.
        factor_masking: whether momentum correction masks sent entries.
        pull: kind of pulls.
        pull_sparsity: sparsity of sparse pulls; None for as much as N pushes.
        staleness: maximum staleness of ssp.
        quorum: quorum of backup; None for all but one.
        every: seconds between two snapshots.
        timeout: seconds for a worker's reply.
    """

    folder: str
    steps: int
    step_ms: float
    batch_size: int
    width: int
    learning_rates: dict[str, float]
    sparsity: float
    factor_masking: bool
    pull: str
    pull_sparsity: float | None
    staleness: int
    quorum: int | None
    every: float
    timeout: float

    def key(self, inner, number, speed, rate, mode, seed):
        """Return the key of a run; settings that a mode does not use are None."""
        served = mode in server_runs.SERVED
        return {
            "inner": inner,
            "workers": number,
            "speed": speed,
            "rate": rate,
            "mode": mode,
            "seed": seed,
            "steps": self.steps,
            "step_ms": self.step_ms,
            "batch_size": self.batch_size,
            "width": self.width,
            "every": self.every,
            "learning_rate": self._learning_rate(inner, number, mode),
            "sparsity": None if mode == "dense" else self.sparsity,
            "factor_masking": self._masks(inner, mode),
            "pull": self.pull if served else None,
            "pull_sparsity": self.pull_sparsity if served else None,
            "staleness": self.staleness if mode == "ssp" else None,
            "quorum": self._quorum(number) if mode == "backup" else None,
        }

    def _masks(self, inner, mode):
        """Return whether momentum is masked; None if the workers have none."""
        return self.factor_masking if inner == "sgd" and mode != "dense" else None

    def _quorum(self, number):
        return self.quorum or max(1, number - 1)

    def _learning_rate(self, inner, number, mode):
        """Return the rate: Adam's step is as long for one push as for all workers."""
        divides = mode in ("async", "ssp") and inner == "adam"
        return self.learning_rates[inner] / (number if divides else 1)


def measure(plan, key):
    """Do a run, and return its row without the key.

    Args:
        plan: a `Plan`.
        key: a key of `Plan.key`.
    """
    number = key["workers"]
    settings = {
        **key,
        "folder": plan.folder,
        "speeds": server_runs.speeds(number, key["speed"]),
        "updates": updates_of(key),
    }
    with server_runs.start_run(settings, key["rate"], _WORKER, plan.timeout) as run:
        figures = run.measure()
        replies = run.ask(do="curve", seconds=figures["seconds"])
    (curve,) = [reply["curve"] for reply in replies if "curve" in reply]
    return {
        **run.warmup_figures,
        **figures,
        "push": replies[0]["push"],
        "pull_bytes": replies[0]["pull_bytes"],
        "curve": curve,
        "value": curve[-1][2],
    }


def updates_of(key):
    """Return the number of updates for as many gradients as all workers compute."""
    number = key["workers"]
    pushes = {"async": 1, "ssp": 1, "backup": key["quorum"]}.get(key["mode"], number)
    return math.ceil(key["steps"] * number / pushes)


def compared(rows):
    """Return the rows with comparisons to the dense run of the same seed.

    The accuracy of a dense run does not depend on the workers' speed, so a dense run of
    any speed serves.

    Args:
        rows: rows of `measure`, with their keys.
    """
    dense = {_dense_key(row): row for row in rows if row["mode"] == "dense"}
    return [_compared(row, dense.get(_dense_key(row))) for row in rows]


def _dense_key(row):
    return (*(row[name] for name in _DENSE_KEYS), row["seed"])


def _compared(row, dense):
    row = {**row, "less": 8 * row["parameters"] / row["bytes"]}
    if dense is None:
        return row
    target, reached = dense["value"], small.Mnist.reached
    good = (point for point in row["curve"] if reached(point[2], target))
    seconds, updates, _ = next(good, (None, None, None))
    return {
        **row,
        "dense": target,
        "within": "yes" if reached(row["value"], target) else "no",
        "target_seconds": seconds,
        "target_updates": updates,
    }


def keys(plan, inners, numbers, speeds, rates, modes, seeds):
    """Return the keys of all runs, grouped by seed and inner optimizer."""
    grid = itertools.product(seeds, inners, numbers, speeds, rates, modes)
    return [
        plan.key(inner, number, speed, rate, mode, seed)
        for seed, inner, number, speed, rate, mode in grid
    ]
