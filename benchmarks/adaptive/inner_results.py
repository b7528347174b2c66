"""What the rows of `inner.py` say: means over seeds, and what methods add to them."""

import numpy as np
from common import pieces
from common.tasks import TASKS

SEED_OF_RATES = 100
"""Seed of the runs by which the rate is chosen, no run that counts."""


def tables(rows, methods):
    """Return a title, lines, columns and notes for each setting with runs that count.

    Args:
        rows: of `inner.py`.
        methods: names of the columns.
    """
    groups = pieces.grouped(rows, ["task", "metric", "steps", "workers"])
    lines = {
        of: summaries(g, TASKS[of[0]].higher_is_better) for of, g in groups.items()
    }
    columns = [("optimizer", "optimizer", ""), ("rate", "rate", ".2g")]
    columns += [(name, name, "") for name in ("dense", *methods)]
    return [
        (_title(*of), shown, columns, *refusals(shown))
        for of, shown in lines.items()
        if shown
    ]


def _title(task, metric, steps, workers):
    title = f"{task}: {metric} after {steps} steps, {workers} workers; "
    return title + "by itself, and what methods add"


def summaries(rows, higher_is_better):
    """Return a row per optimizer, with a text for each method and `dense`.

    Args:
        rows: of `inner.py`, of one task, number of steps and of workers.
        higher_is_better: of the metric.
    """
    sign = -1 if higher_is_better else 1
    found, searched = {}, {}
    for row in rows:
        cell, rate = (row["optimizer"], row["method"]), row["rate"]
        if row["seed"] == SEED_OF_RATES:
            searched.setdefault(cell, {})[rate] = sign * row["value"]
        else:
            by_seed = found.setdefault(cell, {}).setdefault(rate, {})
            by_seed[row["seed"]] = row
    runs = {
        cell: _chosen(by_rate, searched.get(cell, {}))
        for cell, by_rate in found.items()
    }
    return [
        _summary(name, runs, searched) for name, method in runs if method == "dense"
    ]


def _chosen(by_rate, searched):
    """Return runs by seed of the rate that was searched, or that of most seeds."""
    rate = pieces.chosen(searched)
    return by_rate.get(rate) or max(reversed(by_rate.values()), key=len)


def _summary(name, runs, searched):
    dense = runs[name, "dense"]
    first = next(iter(dense.values()))
    values = [row["value"] for row in dense.values()]
    notes = _notes(first, first, searched)
    line = {**first, "refusals": {}, "dense": _cell(values, "", notes)}
    for (optimizer, method), by_seed in runs.items():
        if optimizer == name and method != "dense":
            line[method] = _beside(by_seed, dense, searched)
            if why := next(iter(by_seed.values())).get("refused"):
                line["refusals"].setdefault(why, []).append(method)
    return line


def _beside(by_seed, dense, searched):
    """Return the text of a method: how far it is from the dense runs of its seeds."""
    first = next(iter(by_seed.values()))
    if first.get("refused"):
        return "refused"
    pairs = [(row, dense[seed]) for seed, row in by_seed.items() if seed in dense]
    if not pairs:
        return None
    off = [mine["value"] - theirs["value"] for mine, theirs in pairs]
    return _cell(off, "+", _notes(*pairs[0], searched))


def _notes(row, dense, searched):
    factor = row["rate"] / dense["rate"]
    tried = searched.get((row["optimizer"], row["method"]), ())
    at_edge = pieces.edge(row["rate"], tried)
    return [f"rate x {factor:.2g}"] * (factor != 1) + ["at the edge"] * bool(at_edge)


def _cell(values, sign, notes):
    text = f"{np.mean(values):{sign}.4f}"
    if len(values) > 1:
        text += f" ± {np.std(values, ddof=1):.4f}"
    return text + f" ({', '.join(notes)})" * bool(notes)


def refusals(lines):
    """Return what is said of optimizers that methods refuse."""
    return [
        f"{line['optimizer']} is refused by {', '.join(methods)}: {why}"
        for line in lines
        for why, methods in line["refusals"].items()
    ]
