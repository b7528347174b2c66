"""The optimizers that `inner_optimizers.py` compares, and its tables."""

import keras
import numpy as np
from common import resumable
from tasks.small import TASKS
from training import rate_search

import tf_dgc

optimizers = keras.optimizers


def _mixed(rate):
    """Return an Adam for one-dimensional variables, and another for all others."""
    small, large = optimizers.Adam(rate), optimizers.Adam(rate)
    return optimizers.MultiOptimizer(lambda v: small if len(v.shape) < 2 else large)


def _constant(rate):
    return getattr(rate, "initial_learning_rate", rate)


def _ftrl(rate):
    """Return Ftrl with a constant rate and nearly empty initial accumulators.

    Ftrl computes weights in closed form from its accumulators. With the default of 0.1
    the initial weights would hardly count, and with a rate that decays to 0 all weights
    would vanish: no network trains then.
    """
    return optimizers.Ftrl(_constant(rate), initial_accumulator_value=1e-10)


def _adafactor(rate):
    """Return Adafactor with an `epsilon_1` for rows and columns without gradients.

    With the default of 1e-30, the product of their two means is 0 in float32, and the
    weights become NaN.
    """
    return optimizers.Adafactor(rate, epsilon_1=1e-15)


# By name: function of a learning rate that returns the optimizer, and its usual rate.
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

if hasattr(optimizers, "ScheduleFreeAdamW"):  # since Keras 3.15

    class ScheduleFree(optimizers.ScheduleFreeAdamW):
        """ScheduleFreeAdamW that starts from the weights of its first step.

        Keras's starts from the weights at `build`, but a `Trainer` draws new ones for
        each run.
        """

        def update_step(self, gradient, variable, learning_rate):
            """Update a variable."""
            momentum = self._momentums[self._get_variable_index(variable)]
            first = keras.ops.equal(self.iterations, 0)
            self.assign(momentum, keras.ops.where(first, variable, momentum))
            super().update_step(gradient, variable, learning_rate)

    def _schedule_free(rate):
        """Return `ScheduleFree` with the initial rate of a schedule."""
        return ScheduleFree(_constant(rate))

    INNER["ScheduleFreeAdamW"] = (_schedule_free, 2.5e-3)


SEED_OF_RATES = 100
"""Seed of the runs that choose the learning rate; the tables leave them out."""


def tables(rows, methods):
    """Return a title, lines, columns and notes for each setting.

    Args:
        rows: rows of `inner_optimizers.py`.
        methods: names of the columns.
    """
    groups = resumable.group_rows(rows, ["task", "metric", "steps", "workers"])
    columns = [("optimizer", "optimizer", ""), ("rate", "rate", ".2g")]
    columns += [(name, name, "") for name in ("dense", *methods)]
    tables = []
    for (task, metric, steps, workers), group in groups.items():
        lines = summaries(group, TASKS[task].higher_is_better)
        if lines:  # else there are only rows of rate searches
            title = _title(task, metric, steps, workers)
            tables.append((title, lines, columns, *refusals(lines)))
    return tables


def _title(task, metric, steps, workers):
    title = f"{task}: {metric} after {steps} steps, {workers} workers; "
    return title + "by itself, and what methods add"


def summaries(rows, higher_is_better):
    """Return a row per optimizer, with a text for each method and `dense`.

    Args:
        rows: rows of `inner_optimizers.py` with one task, number of steps and of
            workers.
        higher_is_better: whether larger values of the metric are better.
    """
    sign = -1 if higher_is_better else 1
    runs, searches = {}, {}
    for row in rows:
        cell, rate = (row["optimizer"], row["method"]), row["rate"]
        if row["seed"] == SEED_OF_RATES:
            searches.setdefault(cell, {})[rate] = sign * row["value"]
        else:
            by_seed = runs.setdefault(cell, {}).setdefault(rate, {})
            by_seed[row["seed"]] = row
    selected = {
        cell: _select_rate(by_rate, searches.get(cell, {}))
        for cell, by_rate in runs.items()
    }
    return [
        _summary(optimizer, selected, searches)
        for optimizer, method in selected
        if method == "dense"
    ]


def _select_rate(by_rate, search):
    """Return the runs by seed of the best rate of the search, or of most seeds."""
    rate = rate_search.rate_with_least_value(search)
    return by_rate.get(rate) or max(reversed(by_rate.values()), key=len)


def _summary(name, runs, searches):
    dense = runs[name, "dense"]
    first = next(iter(dense.values()))
    values = [row["value"] for row in dense.values()]
    notes = _notes(first, first, searches)
    line = {**first, "refusals": {}, "dense": _cell(values, "", notes)}
    for (optimizer, method), by_seed in runs.items():
        if optimizer == name and method != "dense":
            line[method] = _method_cell(by_seed, dense, searches)
            if reason := next(iter(by_seed.values())).get("refused"):
                line["refusals"].setdefault(reason, []).append(method)
    return line


def _method_cell(by_seed, dense, searches):
    """Return a method's mean difference to the dense runs of its seeds, as text."""
    first = next(iter(by_seed.values()))
    if first.get("refused"):
        return "refused"
    pairs = [(row, dense[seed]) for seed, row in by_seed.items() if seed in dense]
    if not pairs:
        return None
    differences = [row["value"] - dense_row["value"] for row, dense_row in pairs]
    return _cell(differences, "+", _notes(*pairs[0], searches))


def _notes(row, dense, searches):
    factor = row["rate"] / dense["rate"]
    rates = searches.get((row["optimizer"], row["method"]), ())
    notes = []
    if factor != 1:
        notes.append(f"rate x {factor:.2g}")
    if rate_search.edge(row["rate"], rates):
        notes.append("edge of search")
    return notes


def _cell(values, sign, notes):
    text = f"{np.mean(values):{sign}.4f}"
    if len(values) > 1:
        text += f" ± {np.std(values, ddof=1):.4f}"
    return text + f" ({', '.join(notes)})" * bool(notes)


def refusals(lines):
    """Return notes about optimizers that methods reject."""
    return [
        f"{line['optimizer']} is refused by {', '.join(methods)}: {reason}"
        for line in lines
        for reason, methods in line["refusals"].items()
    ]
