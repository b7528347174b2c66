"""Runs of `server_training.py`: their plan, their rows, and these beside the dense."""

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
_OF_DENSE = ["inner", "workers", "rate", "steps", "batch_size", "width", "step_ms"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all runs have in common.

    Attributes:
        folder: of `digits.prepare`.
        steps: gradients that all workers together compute, by their number.
        step_ms: that a step takes without the update, of a worker that is not slow.
        batch_size: examples of a step of a worker.
        width: units of each hidden layer.
        learning_rates: by inner optimizer, for steps by all workers.
        sparsity: of what is pushed.
        factor_masking: of momentum correction.
        pull: what is pulled.
        pull_sparsity: of a sparse pull; None for as much as N pushes.
        staleness: of ssp.
        quorum: of backup; None for all but one.
        every: seconds from one snapshot to the next.
        timeout: seconds that a worker has to answer.
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
        """Return what tells one row from another; None where it does not matter."""
        served = mode in server_runs.SERVED
        shared = ("steps", "step_ms", "batch_size", "width", "every")
        return {
            **{"inner": inner, "workers": number, "speed": speed, "rate": rate},
            **{"mode": mode, "seed": seed, **{n: getattr(self, n) for n in shared}},
            "learning_rate": self._learning_rate(inner, number, mode),
            "sparsity": None if mode == "dense" else self.sparsity,
            "factor_masking": self._masks(inner, mode),
            "pull": self.pull if served else None,
            "pull_sparsity": self.pull_sparsity if served else None,
            "staleness": self.staleness if mode == "ssp" else None,
            "quorum": self._quorum(number) if mode == "backup" else None,
        }

    def _masks(self, inner, mode):
        """Return whether momentum is masked; None where none is on the workers."""
        return self.factor_masking if inner == "sgd" and mode != "dense" else None

    def _quorum(self, number):
        return self.quorum or max(1, number - 1)

    def _learning_rate(self, inner, number, mode):
        """Return the rate: an Adam moves as far by one push as by a step of all."""
        alone = mode in ("async", "ssp") and inner == "adam"
        return self.learning_rates[inner] / (number if alone else 1)


def measure(plan, key):
    """Return the rest of a run's row: figures, and the curve.

    Args:
        plan: a `Plan`.
        key: of `Plan.key`.
    """
    number = key["workers"]
    settings = {
        **key,
        "folder": plan.folder,
        "speeds": server_runs.speeds(number, key["speed"]),
        "updates": updates_of(key),
    }
    asked = settings, key["rate"], _WORKER, plan.timeout
    with server_runs.started(*asked) as run:
        found = run.take()
        told = run.ask(do="curve", seconds=found["seconds"])
    (curve,) = [answer["curve"] for answer in told if "curve" in answer]
    payloads = {name: told[0][name] for name in ("push", "pull_bytes")}
    return {**run.about, **found, **payloads, "curve": curve, "value": curve[-1][2]}


def updates_of(key):
    """Return the updates that have as many gradients as the steps of all workers."""
    number = key["workers"]
    pushes = {"async": 1, "ssp": 1, "backup": key["quorum"]}.get(key["mode"], number)
    return math.ceil(key["steps"] * number / pushes)


def compared(rows):
    """Return the rows with what follows from that of the dense run of the same seed.

    How good a dense run is does not depend on the workers' speed: where there is none
    of a row's speed, another one's counts.

    Args:
        rows: of `measure`, with their keys.
    """
    dense = {_pair(row): row for row in rows if row["mode"] == "dense"}
    return [_compared(row, dense.get(_pair(row))) for row in rows]


def _pair(row):
    return (*(row[name] for name in _OF_DENSE), row["seed"])


def _compared(row, dense):
    found = {**row, "less": 8 * row["parameters"] / row["bytes"]}
    if dense is None:
        return found
    aim, reached = dense["value"], small.Mnist.reached
    good = (at for at in row["curve"] if reached(at[2], aim))
    seconds, updates, _ = next(good, (None, None, None))
    return {
        **found,
        "dense": aim,
        "within": "yes" if reached(row["value"], aim) else "no",
        "target_seconds": seconds,
        "target_updates": updates,
    }


def keys(plan, inners, numbers, speeds, rates, modes, seeds):
    """Return the keys of all runs, those of a seed and an inner optimizer together."""
    grid = itertools.product(seeds, inners, numbers, speeds, rates, modes)
    return [
        plan.key(inner, number, speed, rate, mode, seed)
        for seed, inner, number, speed, rate, mode in grid
    ]
