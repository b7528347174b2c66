"""What the rows of `adam.py` say: means over seeds, ratios, losses at equal bytes."""

import statistics

import numpy as np
from common import pieces
from study import intervals

from adaptive import runs
from tf_dgc.codecs import value_types

SEED_OF_RATES = 100
"""Seed of the runs by which the rate is chosen, no run that counts."""
KEYS = ["task", "method", "rate", "steps", "workers", "batch", "seed"]


def setting(row):
    """Return what rows that are compared have in common."""
    return tuple(row[name] for name in ("task", "workers", "steps", "batch"))


def summaries(rows, budgets=()):
    """Return a row per run and setting: means over seeds, with their distances.

    Args:
        rows: of `adam.py`.
        budgets: how many times less than a dense run methods may send, where losses are
            to be compared at equal bytes.
    """
    found = {}
    for row in rows:
        if row["seed"] != SEED_OF_RATES:
            of_run = found.setdefault((setting(row), row["method"]), {})
            of_run.setdefault(row["rate"], []).append(row)
    searched = _searched(rows)
    chosen = {key: _choice(by_rate, searched) for key, by_rate in found.items()}
    groups = {key: group for key, (group, _) in chosen.items()}
    return [_summary(*choice, groups, budgets) for choice in chosen.values()]


def _summary(group, search, groups, budgets):
    first, losses = group[0], [row["value"] for row in group]
    curve = _mean_curve(group)
    run = runs.RUNS.get(first["method"], runs.Run(None, None))
    line = {
        **first,
        **ratios({**first, "curve": curve}, run.exempt_dtype),
        **search,
        "curve": curve,
        "value": statistics.mean(losses),
        "spread": (max(losses) - min(losses)) / 2,
        "minutes": statistics.mean(row["seconds"] for row in group) / 60,
        "seeds": len(group),
        "xla": {True: "yes", False: "no"}.get(first.get("jit_compile")),
    }
    for key, name in (("to_dense", "dense"), ("to_control", run.control)):
        line |= _distance(key, group, groups.get((setting(first), name)))
    whole = first["dense_bytes_per_step"] * first["steps"]
    for ratio in budgets:
        line[budget_key(ratio)] = loss_at(curve, whole / ratio)
    return line


def _distance(key, group, control):
    """Return the mean difference in pairs, and half of its interval, where known."""
    if control is None or control is group:
        return {}
    names = group[0]["method"], control[0]["method"]
    difference = intervals.paired([*group, *control], *names)
    return difference.as_columns(key, f"{key}_half_width")


def budget_key(ratio):
    """Return under which name a row has its loss at a budget."""
    return f"loss_at_{ratio:g}"


def loss_at(curve, budget):
    """Return the loss when a worker had sent so many bytes, or at the end before.

    Between two points it is linear in bytes; before the first one it is not known, and
    None.

    Args:
        curve: [(steps, bytes, loss)], ascending.
        budget: bytes.
    """
    _, sent, losses = zip(*curve, strict=True)
    return float(np.interp(budget, sent, losses)) if budget >= sent[0] else None


def ratios(row, exempt_dtype="float32"):
    """Return how many times less than all a worker sent: in total, then, and apart.

    Args:
        row: of `adam.py`; its bytes of exempt tensors are those of float32.
        exempt_dtype: type in which the method sends them.
    """
    size, exempt = row["dense_bytes_per_step"], row["exempt_bytes_per_step"]
    steps, sent, _ = row["curve"][-1]
    begun, before, _ = next(p for p in row["curve"] if p[0] >= row["steps"] // 5)
    per_step = (sent - before) / (steps - begun)
    apart = 1
    if per_step < size:
        others = per_step - sum(value_types.stream_bits(exempt_dtype, exempt // 4)) / 8
        apart = (size - exempt) / others
    return {"ratio": size * steps / sent, "then": size / per_step, "apart": apart}


def _searched(rows):
    """Return losses by rate that were tried, by run and by steps of the search."""
    found = {}
    for row in rows:
        if row["seed"] == SEED_OF_RATES:
            by_steps = found.setdefault(_searched_by(row), {})
            by_steps.setdefault(row["steps"], {})[row["rate"]] = row["value"]
    return found


def _choice(by_rate, searched):
    """Return runs of the rate that was searched, and how: steps, and if at the edge.

    The longest search counts whose rate was run. Where rates were given, it is the runs
    of most seeds, and of those the last, and nothing more.
    """
    last = max(reversed(by_rate.values()), key=len)
    by_steps = searched.get(_searched_by(last[0]), {})
    for steps in sorted(by_steps, reverse=True):
        tried = by_steps[steps]
        rate = pieces.chosen(tried)
        if steps <= last[0]["steps"] and len(tried) > 1 and rate in by_rate:
            edge = pieces.edge(rate, tried)
            return by_rate[rate], {"searched": steps, "edge": edge}
    return last, {}


def _searched_by(row):
    return tuple(row[name] for name in ("task", "method", "workers", "batch"))


def _mean_curve(group):
    points = np.mean([row["curve"] for row in group], axis=0)
    return [(round(at), sent, loss) for at, sent, loss in points.tolist()]
