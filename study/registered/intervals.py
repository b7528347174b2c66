"""Differences of runs that are paired by seed, with their intervals."""

import dataclasses
import math

import numpy as np
from scipy import stats

from registered.rows import has_value


@dataclasses.dataclass(frozen=True)
class Difference:
    """A method less another, by seed.

    Attributes:
        seeds: seeds of which both have ended with a value.
        values: value of the one less that of the other, in order of the seeds.
        failed: seeds of which a run of either has ended without a value, and none with
            one. The mean and the interval know nothing of them.
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
        """Half of the 95 % interval of the mean by Student; infinite under 2 pairs."""
        n = len(self.values)
        if n < 2:
            return math.inf
        error = np.std(self.values, ddof=1) / math.sqrt(n)
        return float(stats.t.ppf(0.975, n - 1) * error)

    @property
    def separates(self):
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half_width

    def as_columns(self, mean="difference", half_width="half_width"):
        """Return what is known, for a table: the mean and half of its interval.

        Nothing if a run failed: a mean of those that did not would praise.

        Args:
            mean: name of the one.
            half_width: name of the other.
        """
        if self.failed:
            return {}
        known = {mean: self.mean, half_width: self.half_width}
        return {name: value for name, value in known.items() if math.isfinite(value)}


def mean_and_spread(runs):
    """Return the mean value of runs and its standard deviation, for a table.

    Args:
        runs: rows of one method.
    """
    values = [run["value"] for run in runs]
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"value": float(np.mean(values)), "spread": spread}


def paired(rows, method, other="dense", label=lambda row: row["method"], scale=None):
    """Return how far a method is from another.

    Args:
        rows: rows of one task, model and number of workers.
        method: label of the one.
        other: label of the other.
        label: function from a row to its label.
        scale: function from both values to what counts as the difference; without,
            they are subtracted.
    """
    found, failed = {}, set()
    for wanted in (method, other):
        own = [row for row in rows if label(row) == wanted]
        found[wanted] = {r["seed"]: r["value"] for r in own if has_value(r)}
        failed |= {row["seed"] for row in own} - found[wanted].keys()
    seeds = sorted(found[method].keys() & found[other].keys())
    scale = scale or (lambda mine, theirs: mine - theirs)
    return Difference(
        tuple(seeds),
        tuple(scale(found[method][seed], found[other][seed]) for seed in seeds),
        tuple(sorted(failed)),
    )
