"""Plots of the metric over steps, bytes and time, with a line per method."""

import math

import matplotlib as mpl

mpl.use("agg")

import numpy as np
from common import resumable
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter


def draw(comparison, path):
    """Plot one task over steps (left) and over bytes (right).

    Lines are means of a method's runs; bands reach from the smallest to the largest.

    Args:
        comparison: a `comparisons.Comparison`.
        path: name of the file; its suffix sets the format.
    """
    figure, axes = _figure(1, 2, figsize=(12, 4.5), sharey=True)
    for label in comparison.labels:
        for axis, key in zip(axes, ("step", "bytes"), strict=True):
            _line(axis, comparison.rows_of(label), key, label)
    for axis in axes:
        axis.grid(visible=True, color="0.93")
        if comparison.metric == "perplexity":
            axis.set_yscale("log")
    axes[0].set(xlabel="steps", ylabel=comparison.metric)
    axes[1].set(xlabel="bytes that a worker has handed to collectives", xscale="log")
    axes[1].xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes[0].legend(fontsize=8)
    _save(figure, path)


def draw_over_time(rows, path):
    """Plot accuracy over seconds: a panel per task, link and processor.

    Args:
        rows: rows of `time_to_accuracy.py`; each run is a line in its method's color.
        path: name of the file; its suffix sets the format.
    """
    methods = list(dict.fromkeys(row["mode"] for row in rows))
    successful = [row for row in rows if row["curve"]]
    panels = resumable.group_rows(successful, ["task", "rate", "processor"])
    height = math.ceil(len(panels) / 2)
    figure, axes = _figure(height, 2, figsize=(12, 4 * height), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (names, runs) in zip(axes.flat, panels.items(), strict=False):
        for (mode,), group in resumable.group_rows(runs, ["mode"]).items():
            for i, row in enumerate(group):
                seconds, _, values = zip(*row["curve"], strict=True)
                style = {"color": f"C{methods.index(mode)}", "lw": 1.2}
                label = None if i else mode
                axis.plot(seconds[1:], values[1:], label=label, **style)
        axis.set(title=", ".join(names), xlabel="seconds", ylabel="accuracy")
        axis.set_xscale("log")
        axis.grid(visible=True, color="0.93")
        axis.legend(fontsize=8)
    _save(figure, path)


def _figure(*shape, **arguments):
    mpl.rcParams["svg.hashsalt"] = "evidence"  # the same bytes for the same runs
    return plt.subplots(*shape, **arguments)


def _save(figure, path):
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _line(axis, rows, key, label):
    if not rows:
        return
    curves = [row["curve"] for row in rows]
    length = min(map(len, curves))
    x = [point[key] for point in curves[0][:length]]
    values = [[p["value"] for p in curve[:length]] for curve in curves]
    values = np.array(values, float)  # NaN where it was not finite
    (line,) = axis.plot(x, values.mean(axis=0), label=label, marker=".")
    if len(curves) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axis.fill_between(x, low, high, color=line.get_color(), alpha=0.15)
