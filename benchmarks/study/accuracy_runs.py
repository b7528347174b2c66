"""Runs of `time_to_accuracy.py`: their keys, their rows, and these beside the dense."""

import itertools
import statistics

from common import server_runs

from study import timed_tasks

METHODS = ["dense", "float16", "power_sgd", "dgc"]
KEYS = ["task", "workers", "rate", "mode", "seed", "steps", "width"]
_OF_DENSE = [name for name in KEYS if name != "mode"]

prepare = timed_tasks.prepare


def keys(tasks, rates, methods, seeds, workers, steps, width):
    """Return the keys of all runs, those of a seed, a task and a link together.

    Args:
        tasks: names of tasks.
        rates: rates of links.
        methods: `dense`, `dgc` or names of methods.
        seeds: seeds.
        workers: number of workers.
        steps: steps of a run.
        width: units of a hidden layer of `digits`.
    """
    grid = itertools.product(seeds, tasks, rates, methods)
    return [
        {
            **{"task": task, "workers": workers, "rate": rate, "mode": method},
            **{"seed": seed, "steps": steps},
            "width": width if task == timed_tasks.Digits.name else None,
        }
        for seed, task, rate, method in grid
    ]


def measure(key, folder, every, timeout):
    """Return the rest of a run's row: figures, and the curve.

    Args:
        key: one of `keys`.
        folder: of `prepare`.
        every: seconds from one snapshot to the next.
        timeout: seconds that a worker has to answer.
    """
    settings = {
        **key,
        **{"folder": folder, "every": every, "updates": key["steps"], "step_ms": 0.0},
        "speeds": server_runs.speeds(key["workers"], 1.0),
    }
    asked = settings, key["rate"], "accuracy_worker.py", timeout
    with server_runs.started(*asked) as run:
        found = run.take()
        told = run.ask(do="curve", seconds=found["seconds"])
    curve = told[0]["curve"]
    return {
        **run.about,
        **found,
        "step_ms": statistics.median(found["median_ms"]),
        **{"handed": told[0]["push"], "curve": curve, "value": curve[-1][2]},
    }


def compared(rows, tolerance):
    """Return the rows with what follows from the dense run of the same seed and link.

    Args:
        rows: of `measure`, with their keys.
        tolerance: how much less than the dense run's is the target.
    """
    dense = {_pair(row): row for row in rows if row["mode"] == "dense"}
    return [_compared(row, dense.get(_pair(row)), tolerance) for row in rows]


def _pair(row):
    return tuple(row[name] for name in _OF_DENSE)


def _compared(row, dense, tolerance):
    if dense is None:
        return row
    target = dense["value"] - tolerance - 1e-9
    seconds, of_dense = (_first(each["curve"], target) for each in (row, dense))
    return {
        **row,
        "to_dense": row["value"] - dense["value"],
        "target_seconds": seconds,
        "times": of_dense / seconds if seconds else None,
    }


def _first(curve, target):
    """Return the seconds at which a target was first reached, or None."""
    return next((at for at, _, value in curve if value >= target), None)
