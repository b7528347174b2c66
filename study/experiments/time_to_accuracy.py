"""The runs of `time_to_accuracy.py`, and comparisons with the dense run."""

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
    """Check the arguments of a command.

    Args:
        methods: `dense`, `dgc` or names of methods.
        looks: number of evaluations of a run.
        steps: number of steps of a run.

    Raises:
        ValueError: if a method is unknown, or there are more looks than steps.
    """
    for method in methods:
        if method not in METHODS:
            compressors.get(method)
    if looks > steps:
        raise ValueError(
            "`looks` must not exceed `steps`. "
            f"Received: looks={looks} and steps={steps}"
        )


def keys(tasks, rates, methods, seeds, width, shared, rows=(), retry=False):
    """Return the keys of all runs, grouped by seed, task and link.

    Args:
        tasks: names of tasks.
        rates: rates of links.
        methods: `dense`, `dgc` or names of methods.
        seeds: seeds.
        width: units of a hidden layer of `digits`.
        shared: settings of all runs: `workers`, `steps`, `looks`, and the machine's
            `processor` and `cpus`.
        rows: rows of earlier runs.
        retry: whether to repeat failed runs.
    """
    last_rows = {run_key(row): row for row in rows}
    keys = []
    for seed, task, rate, method in itertools.product(seeds, tasks, rates, methods):
        key = {
            "task": task,
            "rate": rate,
            "mode": method,
            "seed": seed,
            "width": width if task == timed.Digits.name else None,
            **{name: shared[name] for name in _SHARED},
        }
        key["attempt"] = _attempt(last_rows.get(run_key(key)), retry)
        keys.append(key)
    return keys


def run_key(row):
    """Return the key of a run without the number of the attempt."""
    return tuple(row[name] for name in KEYS if name != "attempt")


def _attempt(last_row, retry):
    """Return the number of failed attempts before this one."""
    if last_row is None:
        return 0
    return last_row["attempt"] + (retry and has_failed(last_row))


def has_failed(row):
    """Return whether a run ended without a value."""
    return row["value"] is None


def measure(key, folder, timeout):
    """Do a run, and return its row without the key.

    If a method fails, the row has an `error` and a value of None. A failure of the
    dense run, which is stock Keras, has another cause and is raised.

    Args:
        key: one of `keys`.
        folder: folder of `prepare`.
        timeout: seconds for a worker's reply.

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
    with server_runs.start_run(settings, key["rate"], _WORKER, timeout) as run:
        figures = run.measure()
        replies = run.ask(do="curve", seconds=figures["seconds"])
    _check_same_weights(key, replies)
    curve = sorted(
        (point for reply in replies for point in reply["curve"]),
        key=lambda point: point[1],
    )
    return {
        **run.warmup_figures,
        **figures,
        "step_ms": statistics.median(figures["median_ms"]),
        "copying": max(reply["copying"] for reply in replies),
        "handed": replies[0]["push"],
        "curve": curve,
        "value": curve[-1][2],
    }


def _check_same_weights(key, replies):
    """Raise an error if workers had different weights at any snapshot."""
    if len({str(reply["sums"]) for reply in replies}) > 1:
        raise WorkerError(f"{key['mode']}: weights differ between workers")


TOLERANCE = 0.005  # the target's distance to the dense run's final accuracy
_DENSE_KEYS = [n for n in KEYS if n not in ("mode", "attempt")]


def compared(rows, tolerance):
    """Return the rows with comparisons to the dense run of the same seed and link.

    Of several attempts at a run, only the last one is returned.

    Args:
        rows: rows of `measure`, with their keys.
        tolerance: distance of the target to the dense run's final accuracy.

    Returns:
        Rows with `to_dense`; `target_seconds` and `target_updates` of the first
        evaluation that reached the target; `since`, seconds of the evaluation before;
        `lasting`, seconds from which all evaluations reach the target; and `times`, the
        ratio of the dense run's time to this run's, which is between `times_least` and
        `times_most` (the dense run lacks these three). Values are None if a run never
        reached the target.
    """
    last_rows = {run_key(row): row for row in rows}.values()
    dense = {_dense_key(row): row for row in last_rows if row["mode"] == "dense"}
    return [_compared(row, dense.get(_dense_key(row)), tolerance) for row in last_rows]


def _dense_key(row):
    return tuple(row[name] for name in _DENSE_KEYS)


def _compared(row, dense, tolerance):
    line = {**row, "failed": "yes" if has_failed(row) else None}
    if dense is None or has_failed(row):
        return line
    # Accuracies are multiples of 1 / examples; the margin absorbs rounding.
    target = dense["value"] - tolerance - 1e-9
    since, seconds, updates = _time_to_target(row["curve"], target)
    line |= {
        "to_dense": row["value"] - dense["value"],
        "target_seconds": seconds,
        "target_updates": updates,
        "since": since,
        "lasting": _lasting(row["curve"], target),
    }
    if seconds and row is not dense:
        dense_since, dense_seconds, _ = _time_to_target(dense["curve"], target)
        line["times"] = dense_seconds / seconds
        line["times_least"] = dense_since / seconds
        line["times_most"] = dense_seconds / since if since else None
    return line


def _time_to_target(curve, target):
    """Return the seconds before the first good evaluation; its own, and updates.

    Ignores the evaluation of the initial weights.
    """
    previous = 0.0
    for seconds, updates, value in curve:
        if updates and value >= target:
            return previous, seconds, updates
        previous = seconds
    return None, None, None


def _lasting(curve, target):
    """Return the seconds from which all evaluations are good, or None."""
    good = itertools.takewhile(lambda point: point[2] >= target, reversed(curve))
    return min((seconds for seconds, *_ in good), default=None)


def summaries(rows):
    """Return a row for each method, task and link, over the seeds with a dense run.

    Args:
        rows: rows of `compared`.

    Returns:
        Rows with `runs`, and how many of them are `failures` or have `reached` the
        target. If no run failed, the mean of `value` and the paired mean of `to_dense`
        with half of its 95 % interval. If all runs reached the target, the mean of
        `target_seconds` and the geometric mean of `times` with its interval; otherwise
        these means would leave out the slow runs.
    """
    dense_keys = {_dense_key(row) for row in rows if row["mode"] == "dense"}
    groups = {}
    for row in rows:
        if _dense_key(row) in dense_keys:
            groups.setdefault(_group_key(row), []).append(row)
    return [_summary(group) for group in groups.values()]


def _group_key(row):
    return row["mode"], *(row[name] for name in _DENSE_KEYS if name != "seed")


def _summary(rows):
    failures = sum(has_failed(row) for row in rows)
    reached = sum(row.get("target_seconds") is not None for row in rows)
    summary = {name: rows[0][name] for name in KEYS if name != "seed"}
    summary |= {"runs": len(rows), "failures": failures, "reached": reached}
    is_dense = rows[0]["mode"] == "dense"
    if not failures:
        summary["value"] = statistics.mean(row["value"] for row in rows)
        summary |= {} if is_dense else _differences(rows)
    if reached == len(rows):
        seconds = [row["target_seconds"] for row in rows]
        summary["target_seconds"] = statistics.mean(seconds)
        summary |= {} if is_dense else _ratios(rows)
    return summary


def _differences(rows):
    difference = _over_seeds(rows, [row["to_dense"] for row in rows])
    half_width = difference.half_width if len(rows) > 1 else None
    return {"to_dense": difference.mean, "half_width": half_width}


def _ratios(rows):
    log = _over_seeds(rows, [math.log(row["times"]) for row in rows])
    if len(rows) == 1:
        return {"times": math.exp(log.mean)}
    return {
        "times_least": math.exp(log.mean - log.half_width),
        "times": math.exp(log.mean),
        "times_most": math.exp(log.mean + log.half_width),
    }


def _over_seeds(rows, values):
    return intervals.Difference(tuple(row["seed"] for row in rows), tuple(values))
