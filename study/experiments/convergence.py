"""The tables of `convergence.py`: means over seeds, and differences to dense."""

import statistics

import numpy as np
from common import method_settings, resumable
from registered import intervals
from tasks.small import TASKS

COLUMNS = [
    ("method", "method", ""),
    ("value", "mean", ".4f"),
    ("spread", "std", ".4f"),
    ("difference", "vs. dense", "+.4f"),
    ("half_width", "± 95 %", ".4f"),
    ("bytes_per_step", "bytes/step", ",.0f"),
    ("ratio", "ratio", ",.1f"),
    ("bytes_to_target", "bytes to target", ",.0f"),
]


def tables(rows):
    """Return a title, lines and columns for each setting.

    Args:
        rows: rows of `convergence.py`.
    """
    groups = resumable.group_rows(rows, ["task", "metric", "steps", "workers"])
    return [
        (_title(task, metric, steps, workers), summaries(group), COLUMNS)
        for (task, metric, steps, workers), group in groups.items()
    ]


def _title(task, metric, steps, workers):
    return f"{task}: {metric} after {steps} steps, {workers} workers"


def summaries(rows):
    """Return a line per method: dense training, methods by name, and the ablation.

    Args:
        rows: rows of `convergence.py` of one setting, with dense runs of all seeds.
    """
    dense = {row["seed"]: row["value"] for row in rows if row["method"] == "dense"}
    groups = resumable.group_rows(rows, ["method"])
    methods = sorted((method for (method,) in groups), key=_position)
    return [_line(groups[method,], rows, dense) for method in methods]


def _position(method):
    """Return the position of a method; unregistered ones come last."""
    order = ["dense", *method_settings.NAMES]
    return order.index(method) if method in order else len(order)


def _line(runs, rows, dense):
    method = runs[0]["method"]
    bytes_per_step = float(np.mean([run["bytes_per_step"] for run in runs]))
    difference = intervals.paired(rows, method).as_columns()
    return {
        **runs[0],
        **intervals.mean_and_spread(runs),
        "dense_value": float(np.mean([dense[run["seed"]] for run in runs])),
        "bytes_per_step": bytes_per_step,
        "ratio": runs[0]["dense_bytes_per_step"] / bytes_per_step,
        "bytes_to_target": _bytes_to_target(runs, dense),
        **({} if method == "dense" else difference),
    }


def _bytes_to_target(runs, dense):
    """Return the median over seeds; None if any run was never as good as dense."""
    num_bytes = [_first_bytes_at_target(run, dense[run["seed"]]) for run in runs]
    return None if None in num_bytes else statistics.median(num_bytes)


def _first_bytes_at_target(run, dense):
    reached = TASKS[run["task"]].reached
    return next((sent for _, sent, v in run["curve"] if reached(v, dense)), None)
