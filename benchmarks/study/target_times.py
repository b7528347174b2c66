"""Rows of `time_to_accuracy.py` beside the dense run's, one by one and over seeds."""

import itertools
import math
import statistics

from study import accuracy_runs, intervals

TOLERANCE = 0.005  # the target is so much below what the dense run ends at
_OF_DENSE = [n for n in accuracy_runs.KEYS if n not in ("mode", "attempt")]


def compared(rows, tolerance):
    """Return the rows with what follows from the dense run of the same seed and link.

    Of a run that was tried again, the last try.

    Args:
        rows: of `accuracy_runs.measure`, with their keys.
        tolerance: how much less than the dense run's is the target.

    Returns:
        Rows with `to_dense`; `target_seconds`, `target_updates`: the first look that is
        good enough; `since`, the one before, so that it came between them; `lasting`,
        seconds from where on all looks are; and, as a share of the dense run's time by
        this one's, `times`, with `times_least` and `times_most` by what is between two
        looks; the dense run has none of these three. None where a run never came to it.
    """
    last = {accuracy_runs.run_of(row): row for row in rows}.values()
    dense = {_pair(r): r for r in last if r["mode"] == "dense"}
    return [_compared(row, dense.get(_pair(row)), tolerance) for row in last]


def _pair(row):
    return tuple(row[name] for name in _OF_DENSE)


def _compared(row, dense, tolerance):
    found = {**row, "failed": "yes" if accuracy_runs.has_failed(row) else None}
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
    failures = sum(accuracy_runs.has_failed(row) for row in rows)
    reached = sum(row.get("target_seconds") is not None for row in rows)
    found = {name: rows[0][name] for name in accuracy_runs.KEYS if name != "seed"}
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
