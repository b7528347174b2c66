"""Runs of `periods.py` by method and period; and in what time they reach a target."""

import statistics

from common import presets
from tasks.small import TASKS

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


class SizeError(ValueError):
    """Exchanges of one model, and runs of another that is much larger or smaller."""


def summaries(rows):
    """Return lists of a row per method and period, means or medians over seeds.

    Args:
        rows: of `periods.py`.

    Returns:
        A list for each task, steps and workers that has a dense run. Runs by other
        learning rates than the chosen one do not count.
    """
    groups = {}
    for row in rows:
        groups.setdefault((row["task"], row["steps"], row["workers"]), []).append(row)
    found = [_of_setting(group, TASKS[task]) for (task, *_), group in groups.items()]
    return [shown for shown in found if shown]


def _of_setting(rows, task):
    tried = {row["rate"]: row["loss"] for row in rows if row["seed"] == SEED_OF_RATES}
    chosen = min(tried, key=tried.get, default=None)
    counted = [
        row
        for row in rows
        if row["seed"] != SEED_OF_RATES
        and (row["method"] not in presets.WITH_ADAMW or row["rate"] == chosen)
    ]
    dense = {row["seed"]: row for row in counted if row["method"] == "dense"}
    groups = {}
    for row in counted:
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
        "parameters": dense[runs[0]["seed"]]["bytes"] / (4 * runs[0]["steps"]),
        "steps_to_target": None if None in reached else statistics.median(reached),
        "runs": len(runs),
    }


def _steps_to(curve, dense_value, task):
    """Return at which step a curve was first as good, or None."""
    good = [step for step, _, value in curve if task.reached(value, dense_value)]
    return min(good, default=None)


def seconds(rows, runs):
    """Return a row per link, mode and period of runs: seconds until the target.

    An exchange takes as long after any number of steps, so it is measured after some.
    Runs are those of as many workers and, of these, of the most steps.

    Args:
        rows: of `distant_runs.add_comparisons`, with the times of steps and exchanges.
        runs: of `periods.py`, which say how many steps it takes.

    Raises:
        SizeError: if the models differ by more than a fourth of their parameters.
    """
    found = summaries(runs)
    needed = {n: _needed(found, n) for n in {row["workers"] for row in rows}}
    return [
        _seconds(row, period, by_task)
        for row in rows
        for (method, period), by_task in needed[row["workers"]].items()
        if method == row["mode"] and "exchange_ms" in row
    ]


def _needed(found, workers):
    """Return by (method, period) the rows of each task, of the longest runs."""
    longest = {}
    for shown in found:
        first = shown[0]
        before = longest.get(first["task"])
        longer = before is None or before[0]["steps"] < first["steps"]
        if first["workers"] == workers and longer:
            longest[first["task"]] = shown
    needed = {}
    for task, shown in longest.items():
        for row in shown:
            needed.setdefault((row["method"], row["period"]), {})[task] = row
    return needed


def _check_sizes(row, by_task):
    for task, run in by_task.items():
        if not 0.8 <= run["parameters"] / row["parameters"] <= 1.25:
            raise SizeError(
                f"Runs of {task} have {run['parameters']:,.0f} parameters: exchanges "
                "have to be of a model of about as many (`--model`). Received: "
                f"{row['parameters']:,d} parameters"
            )


def _seconds(row, period, by_task):
    _check_sizes(row, by_task)
    alone = row["step_ms"] - row["exchange_ms"] / row["period"]
    step = (alone + row["exchange_ms"] / period) / 1000
    steps = {task: run["steps_to_target"] for task, run in by_task.items()}
    return {
        **{name: row[name] for name in ("rate", "delay_ms", "mode")},
        "period": period,
        **{f"{task}_steps": number for task, number in steps.items()},
        **{task: number and number * step for task, number in steps.items()},
    }
