"""Runs of `time_to_accuracy.py`: their keys, and their rows."""

import itertools
import statistics

from common import server_runs
from common.cluster import WorkerError

from study import timed_tasks
from tf_dgc import compressors

METHODS = ["dense", "float16", "power_sgd", "dgc"]
_SHARED = ["workers", "steps", "looks", "processor", "cpus"]
KEYS = ["task", "rate", "mode", "seed", "width", *_SHARED, "attempt"]

prepare = timed_tasks.prepare


def check(methods, looks, steps):
    """Refuse what cannot be run.

    Args:
        methods: `dense`, `dgc` or names of methods.
        looks: looks of a run.
        steps: steps of a run.

    Raises:
        ValueError: if a method is not known, or there are more looks than steps.
    """
    for method in methods:
        if method not in METHODS:
            compressors.get(method)
    if looks > steps:
        raise ValueError(
            "There are as many looks at most as steps. "
            f"Received: looks={looks} and steps={steps}"
        )


def keys(tasks, rates, methods, seeds, width, shared, rows=(), retry=False):
    """Return the keys of all runs, those of a seed, a task and a link together.

    Args:
        tasks: names of tasks.
        rates: rates of links.
        methods: `dense`, `dgc` or names of methods.
        seeds: seeds.
        width: units of a hidden layer of `digits`.
        shared: what all runs have in common: `workers`, `steps`, `looks`, and the
            machine's `processor` and `cpus`.
        rows: of earlier runs.
        retry: whether those that failed are to be run again.
    """
    grid = itertools.product(seeds, tasks, rates, methods)
    found = [
        {
            **{"task": task, "rate": rate, "mode": method, "seed": seed},
            "width": width if task == timed_tasks.Digits.name else None,
            **{name: shared[name] for name in _SHARED},
        }
        for seed, task, rate, method in grid
    ]
    tried = {run_of(row): row for row in rows}
    return [
        {**key, "attempt": _attempt(tried.get(run_of(key)), retry)} for key in found
    ]


def run_of(row):
    """Return what tells a run from another one, whatever came of it before."""
    return tuple(row[name] for name in KEYS if name != "attempt")


def _attempt(before, retry):
    """Return how many tries have failed before this one."""
    if before is None:
        return 0
    return before["attempt"] + (retry and has_failed(before))


def has_failed(row):
    """Return whether a run has ended without a value."""
    return row["value"] is None


def measure(key, folder, timeout):
    """Return the rest of a run's row: figures, and the curve.

    Where a method fails that is the row: `error`, and a value of None. Where the dense
    run fails, which is stock Keras, there is something else the matter.

    Args:
        key: one of `keys`.
        folder: of `prepare`.
        timeout: seconds that a worker has to answer.

    Raises:
        WorkerError: if workers of the dense run fail.
    """
    try:
        return _measure(key, folder, timeout)
    except WorkerError as error:
        if key["mode"] == "dense":
            raise
        return {"value": None, "curve": [], "error": str(error)}


def _measure(key, folder, timeout):
    settings = {
        **key,
        **{"folder": folder, "updates": key["steps"], "step_ms": 0.0},
        "speeds": server_runs.speeds(key["workers"], 1.0),
    }
    asked = settings, key["rate"], "accuracy_worker.py", timeout
    with server_runs.started(*asked) as run:
        found = run.take()
        told = run.ask(do="curve", seconds=found["seconds"])
    _check(key, told)
    curve = sorted(
        (look for t in told for look in t["curve"]), key=lambda look: look[1]
    )
    return {
        **run.about,
        **found,
        "step_ms": statistics.median(found["median_ms"]),
        "copying": max(t["copying"] for t in told),
        **{"handed": told[0]["push"], "curve": curve, "value": curve[-1][2]},
    }


def _check(key, told):
    """Refuse a run in which workers did not have the same weights at every look."""
    if len({str(t["sums"]) for t in told}) > 1:
        raise WorkerError(f"{key['mode']}: weights differ between workers")
