"""What the rows of `horizons.py` say: means over seeds, and distances to dense."""

import numpy as np
from common import pieces
from study import intervals

from adaptive import short

SETTING = ["task", "steps", "workers"]
COLUMNS = [
    ("method", "method", ""),
    ("value", "reached", ".4f"),
    ("spread", "+-", ".4f"),
    ("difference", "to dense", "+.4f"),
    ("half_width", "95 %", ".4f"),
    ("bytes_per_step", "bytes/step", ",.0f"),
    ("gap", "gap", ".2f"),
]


def tables(rows):
    """Return a title, lines and columns for each setting; no column that is empty.

    Args:
        rows: of `horizons.py`.
    """
    return [_table(*of, group) for of, group in pieces.grouped(rows, SETTING).items()]


def _table(task, steps, workers, rows):
    lines = summaries(rows)
    title = f"{task}: {lines[0]['metric']} after {steps} steps, {workers} workers, "
    title += f"seeds: {', '.join(map(str, sorted({s['seeds'] for s in lines})))}"
    columns = [
        column for column in COLUMNS if any(s[column[0]] is not None for s in lines)
    ]
    return title, lines, columns


def summaries(rows):
    """Return a row per run: means over seeds, their deviation, and pairs with dense.

    Args:
        rows: of `horizons.py`, of one setting.
    """
    groups = pieces.grouped(rows, ["method"]).values()
    return [_summary(group, rows) for group in sorted(groups, key=_place)]


def _place(group):
    """Return the place among all runs, or behind them, of names of earlier days."""
    order, name = list(short.RUNS), group[0]["method"]
    return order.index(name) if name in order else len(order)


def _summary(group, rows):
    method = group[0]["method"]
    return {
        **group[0],
        **intervals.mean_and_spread(group),
        "bytes_per_step": np.mean([row["bytes_per_step"] for row in group]),
        "seeds": len(group),
        **dict.fromkeys(("difference", "half_width", "gap")),
        **({} if method == "dense" else _to_dense(group, rows)),
    }


def _to_dense(group, rows):
    """Return the mean difference in pairs, half of its interval, and the gap."""
    seeds = {row["seed"] for row in group}
    others = [row for row in rows if row["seed"] in seeds]
    found = intervals.paired(others, group[0]["method"])
    usual = intervals.paired(others, "dgc")
    told = found.seeds and usual.separates and not (found.failed or usual.failed)
    gap = found.mean / usual.mean if told else None
    return {**found.as_columns(), "gap": gap}
