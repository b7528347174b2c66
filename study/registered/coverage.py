"""How often an interval holds the true mean, if seeds are added until it is narrow."""

import math

import numpy as np
from scipy import stats

from registered import plan
from registered.plan_page import markdown

DEVIATIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0)  # of a pair, in points


def coverage(deviation, times=20_000, seed=0):
    """Return shares of made-up studies of CIFAR-10, by the plan's rule.

    Differences of pairs are normal. Who stops because the interval is narrow stops
    sooner where the deviation happens to look small, and the interval with it.

    Args:
        deviation: standard deviation of the difference of a pair, in points.
        times: number of studies.
        seed: seed of what is drawn.

    Returns:
        The share of intervals that hold the mean; that of the studies that end before
        all seeds are used; and the share of intervals of these that hold the mean, NaN
        if there are none.
    """
    most = len(plan.SEEDS)
    drawn = np.random.default_rng(seed).normal(0.0, deviation, (times, most))
    holds, ends = np.zeros(times, bool), np.zeros(times, int)
    for pairs in range(plan.PLANNED_SEEDS, most + 1):
        means, half_widths = _intervals(drawn[:, :pairs])
        now = (ends == 0) & ((half_widths <= plan.HALF_WIDTH) | (pairs == most))
        holds[now], ends[now] = (np.abs(means) <= half_widths)[now], pairs
    early = ends < most
    of_early = float(holds[early].mean()) if early.any() else math.nan
    return float(holds.mean()), float(early.mean()), of_early


def table():
    """Return `coverage` of some deviations, as Markdown."""
    lines = [
        [deviation, *(f"{share:.1%}" for share in coverage(deviation))]
        for deviation in DEVIATIONS
    ]
    headings = ["deviation of a pair, points", "intervals that hold the mean"]
    return markdown([*headings, "studies that stop early", "of these"], lines)


def _intervals(drawn):
    pairs = drawn.shape[1]
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(pairs)
    return drawn.mean(axis=1), stats.t.ppf(0.975, pairs - 1) * errors
