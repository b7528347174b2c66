"""The tables of `periods.py`: runs by method and period, and times to a target."""

import statistics

from common import presets
from tasks.small import TASKS

SEED_OF_RATES = 100
"""Seed of the runs that choose the learning rate; the tables leave them out."""
COLUMNS = [
    ("rate", "rate", ""),
    ("delay_ms", "round trip (ms)", "g"),
    ("mode", "mode", ""),
    ("period", "H", "d"),
    *((f"{task}_steps", f"{task}: steps", ",.0f") for task in TASKS),
    *((task, f"{task}: seconds", ",.0f") for task in TASKS),
]


class SizeError(ValueError):
    """The models of exchanges and of runs differ too much in size."""


def summaries(rows):
    """Return lists of a row per method and period, means or medians over seeds.

    Args:
        rows: rows of `periods.py`.

    Returns:
        A list for each task, number of steps and of workers that has a dense run. Runs
        with learning rates that the search did not select are left out.
    """
    groups = {}
    for row in rows:
        groups.setdefault((row["task"], row["steps"], row["workers"]), []).append(row)
    settings = [
        _summaries_of_setting(group, TASKS[task])
        for (task, *_), group in groups.items()
    ]
    return [lines for lines in settings if lines]


def _summaries_of_setting(rows, task):
    losses = {row["rate"]: row["loss"] for row in rows if row["seed"] == SEED_OF_RATES}
    adamw_rate = min(losses, key=losses.get, default=None)
    selected = [
        row
        for row in rows
        if row["seed"] != SEED_OF_RATES
        and (row["method"] not in presets.WITH_ADAMW or row["rate"] == adamw_rate)
    ]
    dense = {row["seed"]: row for row in selected if row["method"] == "dense"}
    groups = {}
    for row in selected:
        if row["seed"] in dense:
            groups.setdefault((row["method"], row["period"]), []).append(row)
    return [_summary(runs, dense, task) for runs in groups.values()]


def _summary(runs, dense, task):
    values = [row["value"] for row in runs]
    steps_to_target = [
        _steps_to_target(row["curve"], dense[row["seed"]]["value"], task)
        for row in runs
    ]
    loss = statistics.mean(row["loss"] for row in runs)
    dense_loss = statistics.mean(dense[row["seed"]]["loss"] for row in runs)
    return {
        **runs[0],
        "value": statistics.median(values),
        "spread": (max(values) - min(values)) / 2,
        "loss": loss,
        "to_dense": loss / dense_loss - 1,
        "bytes_per_step": statistics.median(r["bytes"] / r["steps"] for r in runs),
        "parameters": dense[runs[0]["seed"]]["bytes"] / (4 * runs[0]["steps"]),
        "steps_to_target": None
        if None in steps_to_target
        else statistics.median(steps_to_target),
        "runs": len(runs),
    }


def _steps_to_target(curve, dense_value, task):
    """Return the first step at which a run was as good as dense, or None."""
    steps = [step for step, _, value in curve if task.reached(value, dense_value)]
    return min(steps, default=None)


def seconds(rows, runs):
    """Return a row per link, mode and period of runs: seconds until the target.

    The duration of an exchange does not depend on the period, so that rows with any
    period serve. Uses the longest runs with the same number of workers.

    Args:
        rows: rows of `distant_runs.add_comparisons`, with times of steps and exchanges.
        runs: rows of `periods.py`, with the number of steps to the target.

    Raises:
        SizeError: if the numbers of parameters differ by more than a fourth.
    """
    lines = summaries(runs)
    longest = {n: _longest_runs(lines, n) for n in {row["workers"] for row in rows}}
    return [
        _seconds(row, period, by_task)
        for row in rows
        for (method, period), by_task in longest[row["workers"]].items()
        if method == row["mode"] and "exchange_ms" in row
    ]


def _longest_runs(all_lines, workers):
    """Return the summaries of the longest runs, by (method, period) and task."""
    longest = {}
    for lines in all_lines:
        first = lines[0]
        other = longest.get(first["task"])
        longer = other is None or other[0]["steps"] < first["steps"]
        if first["workers"] == workers and longer:
            longest[first["task"]] = lines
    by_run = {}
    for task, lines in longest.items():
        for line in lines:
            by_run.setdefault((line["method"], line["period"]), {})[task] = line
    return by_run


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
    computing_ms = row["step_ms"] - row["exchange_ms"] / row["period"]
    step_seconds = (computing_ms + row["exchange_ms"] / period) / 1000
    steps = {task: run["steps_to_target"] for task, run in by_task.items()}
    return {
        **{name: row[name] for name in ("rate", "delay_ms", "mode")},
        "period": period,
        **{f"{task}_steps": number for task, number in steps.items()},
        **{task: number and number * step_seconds for task, number in steps.items()},
    }
