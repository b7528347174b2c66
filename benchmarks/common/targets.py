"""Runs of `periods.py` by method and period; and in what time they reach a target."""

import itertools
import statistics

from common.tasks import TASKS

SEED_OF_RATES = 100
"""Of runs by which a rate is chosen, and which do not count."""
COLUMNS = [
    ("rate", "rate", ""),
    ("delay_ms", "round trip (ms)", "g"),
    ("mode", "mode", ""),
    ("period", "H", "d"),
    *((f"{task}_steps", f"{task}: steps", ",.0f") for task in TASKS),
    *((task, f"{task}: seconds", ",.0f") for task in TASKS),
]


def summaries(rows):
    """Return lists of a row per method and period, means or medians over seeds.

    Args:
        rows: of `periods.py`.

    Returns:
        A list for each task, steps and workers that has a dense run.
    """
    counted = [row for row in rows if row["seed"] != SEED_OF_RATES]
    groups = {}
    for row in counted:
        groups.setdefault((row["task"], row["steps"], row["workers"]), []).append(row)
    found = [_of_setting(group, TASKS[task]) for (task, *_), group in groups.items()]
    return [shown for shown in found if shown]


def _of_setting(rows, task):
    dense = {row["seed"]: row for row in rows if row["method"] == "dense"}
    groups = {}
    for row in rows:
        if row["seed"] in dense:
            groups.setdefault((row["method"], row["period"]), []).append(row)
    return [_summary(runs, dense, task) for runs in groups.values()]


def _summary(runs, dense, task):
    values = [row["value"] for row in runs]
    aims = {seed: row["value"] for seed, row in dense.items()}
    reached = [_steps_to(row["curve"], aims[row["seed"]], task) for row in runs]
    loss = statistics.mean(row["loss"] for row in runs)
    control = statistics.mean(dense[row["seed"]]["loss"] for row in runs)
    return {
        **runs[0],
        "value": statistics.median(values),
        "spread": (max(values) - min(values)) / 2,
        "loss": loss,
        "to_dense": loss / control - 1,
        "bytes_per_step": statistics.median(r["bytes"] / r["steps"] for r in runs),
        "steps_to_target": None if None in reached else statistics.median(reached),
        "runs": len(runs),
    }


def _steps_to(curve, dense_value, task):
    """Return at which step a curve was first as good, or None."""
    good = [step for step, _, value in curve if task.reached(task, value, dense_value)]
    return min(good, default=None)


def seconds(rows, runs):
    """Return a row per link, mode and period of runs: seconds until the target.

    An exchange takes as long after any number of steps, so it is measured after some.

    Args:
        rows: of `far_runs.compared`, which say what steps and exchanges take.
        runs: of `periods.py`, which say how many steps it takes.
    """
    steps = {}
    for summary in itertools.chain(*summaries(runs)):
        name = summary["method"], summary["period"]
        steps.setdefault(name, {})[summary["task"]] = summary["steps_to_target"]
    return [
        _seconds(row, period, by_task)
        for row in rows
        for (method, period), by_task in steps.items()
        if method == row["mode"] and "exchange_ms" in row
    ]


def _seconds(row, period, by_task):
    alone = row["step_ms"] - row["exchange_ms"] / row["period"]
    step = (alone + row["exchange_ms"] / period) / 1000
    return {
        **{name: row[name] for name in ("rate", "delay_ms", "mode")},
        "period": period,
        **{f"{task}_steps": needed for task, needed in by_task.items()},
        **{task: needed and needed * step for task, needed in by_task.items()},
    }
