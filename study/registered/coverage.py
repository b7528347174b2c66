"""Simulates how often an interval covers the true mean.

The plan adds seeds until the interval is narrow, which lowers its coverage.
"""

import math

import numpy as np
from scipy import stats

from registered import plan
from registered.plan_page import markdown

DEVIATIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0)  # of a pair, in points


def coverage(deviation, times=20_000, seed=0):
    """Simulate studies of CIFAR-10 by the plan's rule, and return their coverage.

    Differences of pairs are normal. A study tends to stop when its deviation happens
    to look small, so that its interval is too narrow.

    Args:
        deviation: standard deviation of the difference of a pair, in points.
        times: number of studies.
        seed: seed of the random differences.

    Returns:
        The share of intervals that cover the mean; the share of studies that end before
        all seeds are used; and the share of those studies' intervals that cover the
        mean, NaN if there are none.
    """
    num_seeds = len(plan.SEEDS)
    random = np.random.default_rng(seed)
    differences = random.normal(0.0, deviation, (times, num_seeds))
    covers, num_pairs = np.zeros(times, bool), np.zeros(times, int)
    for pairs in range(plan.PLANNED_SEEDS, num_seeds + 1):
        means, half_widths = _intervals(differences[:, :pairs])
        stops = (half_widths <= plan.HALF_WIDTH) | (pairs == num_seeds)
        stops &= num_pairs == 0
        covers[stops] = (np.abs(means) <= half_widths)[stops]
        num_pairs[stops] = pairs
    early = num_pairs < num_seeds
    early_coverage = float(covers[early].mean()) if early.any() else math.nan
    return float(covers.mean()), float(early.mean()), early_coverage


def table():
    """Return the coverage for several deviations, as Markdown."""
    lines = [
        [deviation, *(f"{share:.1%}" for share in coverage(deviation))]
        for deviation in DEVIATIONS
    ]
    headings = ["deviation of a pair, points", "intervals that hold the mean"]
    return markdown([*headings, "studies that stop early", "of these"], lines)


def _intervals(differences):
    pairs = differences.shape[1]
    errors = differences.std(axis=1, ddof=1) / math.sqrt(pairs)
    return differences.mean(axis=1), stats.t.ppf(0.975, pairs - 1) * errors
