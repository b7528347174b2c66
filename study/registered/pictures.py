"""The metric against steps, bytes and time: a line per method."""

import math

import matplotlib as mpl

mpl.use("agg")

import numpy as np
from common import resumable
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter


def draw(found, path):
    """Draw one task: on the left against steps, on the right against bytes.

    A line is the mean of a method's runs, and a band from the least to the largest.

    Args:
        found: a `comparison.Comparison`.
        path: name of the file; its ending decides on the format.
    """
    figure, axes = _figure(1, 2, figsize=(12, 4.5), sharey=True)
    for label in found.labels:
        for axis, key in zip(axes, ("step", "bytes"), strict=True):
            _line(axis, found.of(label), key, label)
    for axis in axes:
        axis.grid(visible=True, color="0.93")
        if found.metric == "perplexity":
            axis.set_yscale("log")
    axes[0].set(xlabel="steps", ylabel=found.metric)
    axes[1].set(xlabel="bytes that a worker has handed to collectives", xscale="log")
    axes[1].xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes[0].legend(fontsize=8)
    _save(figure, path)


def draw_over_time(rows, path):
    """Draw accuracy against seconds: a panel per task, link and processor.

    Args:
        rows: of `time_to_accuracy.py`; every run is a line, methods have a color each.
        path: name of the file; its ending decides on the format.
    """
    methods = list(dict.fromkeys(row["mode"] for row in rows))
    ended = [row for row in rows if row["curve"]]  # not those that failed
    panels = resumable.group_rows(ended, ["task", "rate", "processor"])
    height = math.ceil(len(panels) / 2)
    figure, axes = _figure(height, 2, figsize=(12, 4 * height), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (names, runs) in zip(axes.flat, panels.items(), strict=False):
        for (mode,), own in resumable.group_rows(runs, ["mode"]).items():
            for i, row in enumerate(own):
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
    at = [point[key] for point in curves[0][:length]]
    values = [[p["value"] for p in curve[:length]] for curve in curves]
    values = np.array(values, float)  # NaN where it was not finite
    (line,) = axis.plot(at, values.mean(axis=0), label=label, marker=".")
    if len(curves) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axis.fill_between(at, low, high, color=line.get_color(), alpha=0.15)
