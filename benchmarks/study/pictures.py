"""The metric against steps and bytes: a line per method, the mean of its runs."""

import matplotlib as mpl

mpl.use("agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter


def draw(found, path):
    """Draw one task: on the left against steps, on the right against bytes.

    Args:
        found: a `comparison.Comparison`.
        path: name of the file; its ending decides on the format.
    """
    mpl.rcParams["svg.hashsalt"] = "evidence"  # the same bytes for the same runs
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
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
