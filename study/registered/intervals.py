"""Differences of runs that are paired by seed, and their confidence intervals."""

import dataclasses
import math
import operator

import numpy as np
from scipy import stats

from registered.rows import has_value


@dataclasses.dataclass(frozen=True)
class Difference:
    """Differences of two methods by seed.

    Attributes:
        seeds: seeds for which both methods have a value.
        values: the method's value minus the other's, in order of the seeds.
        failed: seeds for which either method has runs, but none with a value. The mean
            and the interval leave them out.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    failed: tuple[int, ...] = ()

    @property
    def mean(self):
        """Mean difference; NaN without a pair."""
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def half_width(self):
        """Half of the mean's 95 % interval (Student); infinite below 2 pairs."""
        n = len(self.values)
        if n < 2:
            return math.inf
        error = np.std(self.values, ddof=1) / math.sqrt(n)
        return float(stats.t.ppf(0.975, n - 1) * error)

    @property
    def separates(self):
        """Whether the interval excludes 0."""
        return abs(self.mean) > self.half_width

    def as_columns(self, mean="difference", half_width="half_width"):
        """Return the finite ones of mean and half width, as cells of a table.

        Returns nothing if a run failed: the mean of the others would be too good.

        Args:
            mean: column of the mean.
            half_width: column of the half width.
        """
        if self.failed:
            return {}
        cells = {mean: self.mean, half_width: self.half_width}
        return {name: value for name, value in cells.items() if math.isfinite(value)}


def mean_and_spread(runs):
    """Return the mean value of runs and its standard deviation, as cells of a table.

    Args:
        runs: rows of one method.
    """
    values = [run["value"] for run in runs]
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"value": float(np.mean(values)), "spread": spread}


def paired(rows, method, other="dense", label=lambda row: row["method"], scale=None):
    """Return the `Difference` of a method to another.

    Args:
        rows: rows of one task, model and number of workers.
        method: label of the method.
        other: label of the method that it is compared with.
        label: function from a row to its label.
        scale: function from both values to their difference; by default they are
            subtracted.
    """
    values, failed = _values_by_seed(rows, method, label)
    other_values, other_failed = _values_by_seed(rows, other, label)
    seeds = sorted(values.keys() & other_values.keys())
    scale = scale or operator.sub
    return Difference(
        tuple(seeds),
        tuple(scale(values[seed], other_values[seed]) for seed in seeds),
        tuple(sorted(failed | other_failed)),
    )


def _values_by_seed(rows, method, label):
    """Return a method's values by seed, and the seeds without a value."""
    rows = [row for row in rows if label(row) == method]
    values = {row["seed"]: row["value"] for row in rows if has_value(row)}
    return values, {row["seed"] for row in rows} - values.keys()
