"""Runs of `time_to_accuracy.py`, and their rows compared with the dense run's."""

import itertools
import math
import pathlib
import statistics

from common import server_runs
from common.cluster import WorkerError
from registered import intervals
from tasks import timed

from tf_dgc import compressors

_WORKER = pathlib.Path(__file__).parents[1] / "workers" / "accuracy_worker.py"
METHODS = ["dense", "float16", "power_sgd", "dgc"]
_SHARED = ["workers", "steps", "looks", "processor", "cpus"]
KEYS = ["task", "rate", "mode", "seed", "width", *_SHARED, "attempt"]

prepare = timed.prepare


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
            "width": width if task == timed.Digits.name else None,
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
    asked = settings, key["rate"], _WORKER, timeout
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


TOLERANCE = 0.005  # the target is so much below what the dense run ends at
_OF_DENSE = [n for n in KEYS if n not in ("mode", "attempt")]


def compared(rows, tolerance):
    """Return the rows with what follows from the dense run of the same seed and link.

    Of a run that was tried again, the last try.

    Args:
        rows: of `measure`, with their keys.
        tolerance: how much less than the dense run's is the target.

    Returns:
        Rows with `to_dense`; `target_seconds`, `target_updates`: the first look that is
        good enough; `since`, the one before, so that it came between them; `lasting`,
        seconds from where on all looks are; and, as a share of the dense run's time by
        this one's, `times`, with `times_least` and `times_most` by what is between two
        looks; the dense run has none of these three. None where a run never came to it.
    """
    last = {run_of(row): row for row in rows}.values()
    dense = {_pair(r): r for r in last if r["mode"] == "dense"}
    return [_compared(row, dense.get(_pair(row)), tolerance) for row in last]


def _pair(row):
    return tuple(row[name] for name in _OF_DENSE)


def _compared(row, dense, tolerance):
    found = {**row, "failed": "yes" if has_failed(row) else None}
    if dense is None or found["failed"]:
        return found
    # Values are shares of so many examples, whose difference is rounded.
    target = dense["value"] - tolerance - 1e-9
    since, seconds, updates = _reached(row["curve"], target)
    found |= {
        "to_dense": row["value"] - dense["value"],
        **{"target_seconds": seconds, "target_updates": updates, "since": since},
        "lasting": _lasting(row["curve"], target),
    }
    if seconds and row is not dense:
        dense_since, of_dense, _ = _reached(dense["curve"], target)
        found["times"] = of_dense / seconds
        found["times_least"] = dense_since / seconds
        found["times_most"] = of_dense / since if since else None
    return found


def _reached(curve, target):
    """Return seconds of the look before the first good one; its own, and updates.

    The look before the first step does not count: nothing has been trained.
    """
    before = 0.0
    for seconds, updates, value in curve:
        if updates and value >= target:
            return before, seconds, updates
        before = seconds
    return None, None, None


def _lasting(curve, target):
    """Return the seconds from where on all looks are good, or None."""
    good = itertools.takewhile(lambda look: look[2] >= target, reversed(curve))
    return min((seconds for seconds, *_ in good), default=None)


def summaries(shown):
    """Return a row for each method, task and link, over the seeds with a dense run.

    Args:
        shown: of `compared`.

    Returns:
        Rows with `runs`, and how many of them have `failures` or have `reached` the
        target. Where none has failed, the mean of `value` and, by pairs, of `to_dense`,
        with half of its 95 % interval. Where all have reached the target, the mean of
        `target_seconds` and the geometric mean of `times` with its interval: those that
        have not are the slow ones.
    """
    paired = {_pair(row) for row in shown if row["mode"] == "dense"}
    groups = {}
    for row in shown:
        if _pair(row) in paired:
            groups.setdefault(_method(row), []).append(row)
    return [_summary(group) for group in groups.values()]


def _method(row):
    return row["mode"], *(row[name] for name in _OF_DENSE if name != "seed")


def _summary(rows):
    failures = sum(has_failed(row) for row in rows)
    reached = sum(row.get("target_seconds") is not None for row in rows)
    found = {name: rows[0][name] for name in KEYS if name != "seed"}
    found |= {"runs": len(rows), "failures": failures, "reached": reached}
    is_dense = rows[0]["mode"] == "dense"
    if not failures:
        found["value"] = statistics.mean(row["value"] for row in rows)
        found |= {} if is_dense else _differences(rows)
    if reached == len(rows):
        seconds = [row["target_seconds"] for row in rows]
        found["target_seconds"] = statistics.mean(seconds)
        found |= {} if is_dense else _ratios(rows)
    return found


def _differences(rows):
    found = _over_seeds(rows, "to_dense", lambda value: value)
    half = found.half_width if len(rows) > 1 else None
    return {"to_dense": found.mean, "half_width": half}


def _ratios(rows):
    found = _over_seeds(rows, "times", math.log)
    if len(rows) == 1:
        return {"times": math.exp(found.mean)}
    ends = found.mean - found.half_width, found.mean, found.mean + found.half_width
    names = "times_least", "times", "times_most"
    return dict(zip(names, map(math.exp, ends), strict=True))


def _over_seeds(rows, name, scale):
    values = [scale(row[name]) for row in rows]
    return intervals.Difference(tuple(r["seed"] for r in rows), tuple(values))
