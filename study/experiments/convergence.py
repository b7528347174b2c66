"""What the rows of `convergence.py` say: means over seeds, and distances to dense."""

import statistics

import numpy as np
from common import method_settings, resumable
from registered import intervals
from tasks.small import TASKS

COLUMNS = [
    ("method", "method", ""),
    ("value", "reached", ".4f"),
    ("spread", "+-", ".4f"),
    ("difference", "to dense", "+.4f"),
    ("half_width", "95 %", ".4f"),
    ("bytes_per_step", "bytes/step", ",.0f"),
    ("ratio", "ratio", ",.1f"),
    ("bytes_to_target", "bytes to target", ",.0f"),
]


def tables(rows):
    """Return a title, lines and columns for each setting.

    Args:
        rows: of `convergence.py`.
    """
    groups = resumable.group_rows(rows, ["task", "metric", "steps", "workers"])
    return [(_title(*of), summaries(group), COLUMNS) for of, group in groups.items()]


def _title(task, metric, steps, workers):
    return f"{task}: {metric} after {steps} steps, {workers} workers"


def summaries(rows):
    """Return a line per method: dense training, methods by name, and the ablation.

    Args:
        rows: of `convergence.py`, of one setting, with dense runs of all seeds.
    """
    dense = {row["seed"]: row["value"] for row in rows if row["method"] == "dense"}
    methods = resumable.group_rows(rows, ["method"])
    order = sorted(methods, key=lambda names: _place(*names))
    return [_line(methods[names], rows, dense) for names in order]


def _place(name):
    """Return the place of a method; what has no name stays as it was run, behind."""
    order = ["dense", *method_settings.NAMES]
    return order.index(name) if name in order else len(order)


def _line(runs, rows, dense):
    method, sent = runs[0]["method"], np.mean([run["bytes_per_step"] for run in runs])
    to_dense = intervals.paired(rows, method).as_columns()
    return {
        **runs[0],
        **intervals.mean_and_spread(runs),
        "dense_value": float(np.mean([dense[run["seed"]] for run in runs])),
        "bytes_per_step": float(sent),
        "ratio": runs[0]["dense_bytes_per_step"] / float(sent),
        "bytes_to_target": _bytes_to_target(runs, dense),
        **({} if method == "dense" else to_dense),
    }


def _bytes_to_target(runs, dense):
    """Return the median over seeds; None if any has not been as good as dense."""
    found = [_first(run, dense[run["seed"]]) for run in runs]
    return None if None in found else statistics.median(found)


def _first(run, dense):
    reached = TASKS[run["task"]].reached
    return next((sent for _, sent, v in run["curve"] if reached(v, dense)), None)
