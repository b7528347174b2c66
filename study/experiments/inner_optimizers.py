"""The optimizers that `inner.py` trains by, and what its rows say."""

import keras
import numpy as np
from common import resumable
from tasks.small import TASKS
from training import rate_search

import tf_dgc

optimizers = keras.optimizers


def _mixed(rate):
    """Return one Adam for what has one dimension, and another for all else."""
    small, large = optimizers.Adam(rate), optimizers.Adam(rate)
    return optimizers.MultiOptimizer(lambda v: small if len(v.shape) < 2 else large)


def _constant(rate):
    return getattr(rate, "initial_learning_rate", rate)


def _ftrl(rate):
    """Return Ftrl of a constant rate, whose accumulators begin at almost nothing.

    It has weights in a closed form of what it accumulated. By 0.1, the default, those
    that a network begins with count for nearly nothing there, and by a rate that goes
    to 0 all weights do: no network trains then.
    """
    return optimizers.Ftrl(_constant(rate), initial_accumulator_value=1e-10)


def _adafactor(rate):
    """Return Adafactor that takes a row and a column without gradients.

    By 1e-30, the default, the product of their two means is 0 in float32, and the
    weights are no numbers.
    """
    return optimizers.Adafactor(rate, epsilon_1=1e-15)


# How an optimizer is made with a learning rate, and which rate is usual.
INNER = {
    "SGD": (optimizers.SGD, 0.3),
    "SGD momentum": (lambda rate: optimizers.SGD(rate, 0.9), 0.1),
    "SGD Nesterov": (lambda rate: optimizers.SGD(rate, 0.9, nesterov=True), 0.1),
    "NovoGrad": (tf_dgc.NovoGrad, 0.02),
    "Adam": (optimizers.Adam, 2e-3),
    "AdamW": (optimizers.AdamW, 2e-3),
    "Adam AMSGrad": (lambda rate: optimizers.Adam(rate, amsgrad=True), 2e-3),
    "Nadam": (optimizers.Nadam, 2e-3),
    "Adamax": (optimizers.Adamax, 4e-3),
    "RMSprop": (optimizers.RMSprop, 1e-3),
    "Adagrad": (optimizers.Adagrad, 0.03),
    "Adadelta": (optimizers.Adadelta, 1.0),
    "Lamb": (optimizers.Lamb, 1e-2),
    "Lion": (optimizers.Lion, 3e-4),
    "Ftrl": (_ftrl, 0.03),
    "Adafactor": (_adafactor, 1e-2),
    "Muon": (optimizers.Muon, 1e-3),
    "MultiOptimizer": (_mixed, 2e-3),
}

if hasattr(optimizers, "ScheduleFreeAdamW"):  # of Keras 3.15

    class ScheduleFree(optimizers.ScheduleFreeAdamW):
        """ScheduleFreeAdamW that begins at the weights of its first step.

        Keras's begins at those that it is built for, and a `Trainer` draws them anew
        for each run.
        """

        def update_step(self, gradient, variable, learning_rate):
            """Update a variable."""
            begun = self._momentums[self._get_variable_index(variable)]
            first = keras.ops.equal(self.iterations, 0)
            self.assign(begun, keras.ops.where(first, variable, begun))
            super().update_step(gradient, variable, learning_rate)

    def _schedule_free(rate):
        """Return it with a constant rate, the first one of a schedule."""
        return ScheduleFree(_constant(rate))

    INNER["ScheduleFreeAdamW"] = (_schedule_free, 2.5e-3)


SEED_OF_RATES = 100
"""Seed of the runs by which the rate is chosen, no run that counts."""


def tables(rows, methods):
    """Return a title, lines, columns and notes for each setting with runs that count.

    Args:
        rows: of `inner.py`.
        methods: names of the columns.
    """
    groups = resumable.group_rows(rows, ["task", "metric", "steps", "workers"])
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
    rate = rate_search.chosen(searched)
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
    at_edge = rate_search.edge(row["rate"], tried)
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
