"""The picture of `convergence.py`: how good a method is against what it sends."""

import itertools

import matplotlib as mpl

mpl.use("agg")

from adjustText import adjust_text
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter


def draw(rows, path):
    """Draw one panel per task; a point per method, its spread over seeds as a bar.

    Args:
        rows: of `convergence.summaries`.
        path: of the picture; its ending decides on the format.
    """
    panels = [list(g) for _, g in itertools.groupby(rows, lambda row: row["task"])]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(11, 8 * len(panels)), squeeze=False
    )
    for (axis,), panel in zip(axes, panels, strict=True):
        _panel(axis, panel)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _panel(axis, rows):
    first = rows[0]
    axis.set_title(
        f"{first['task']}, {first['steps']} steps, {first['workers']} workers"
    )
    axis.set_xlabel("bytes per step and worker")
    axis.set_ylabel(first["metric"])
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axis.axhline(first["dense_value"], color="0.8", zorder=0)
    axis.grid(visible=True, color="0.93", zorder=0)
    labels = []
    for row in rows:
        at = (row["bytes_per_step"], row["value"])
        axis.errorbar(*at, yerr=row["spread"], fmt=".", markersize=8, capsize=2)
        labels.append(axis.text(*at, row["method"], fontsize=7))
    lines = {"arrowstyle": "-", "color": "0.7"}
    adjust_text(labels, ax=axis, expand=(1.3, 1.7), arrowprops=lines)
