"""Pictures of `adam.py` and `convergence.py`: metrics against bytes and steps."""

import itertools
import math

import matplotlib as mpl

mpl.use("agg")

from adjustText import adjust_text
from common.resumable import group_rows
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter


def draw(rows, path):
    """Plot a panel per setting: a point per method, and its spread as an error bar.

    Args:
        rows: lines of `convergence.tables`.
        path: path of the picture; its suffix sets the format.
    """
    panels = list(group_rows(rows, ["task", "steps", "workers"]).values())
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(11, 8 * len(panels)), squeeze=False
    )
    for (axis,), panel in zip(axes, panels, strict=True):
        _panel(axis, panel)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def draw_curves(panels, path):
    """Plot the metric over steps and over bytes; two panels per setting.

    Args:
        panels: dictionary from a title to rows, one per method, whose `curve` is
            [(steps, bytes, value)].
        path: path of the picture; its suffix sets the format.
    """
    figure, axes = plt.subplots(
        len(panels),
        2,
        figsize=(14, 6 * len(panels)),
        squeeze=False,
        layout="constrained",
    )
    for pair, (title, rows) in zip(axes, panels.items(), strict=True):
        pair[0].set_title(title, loc="left")
        for index, axis in enumerate(pair):
            _draw_lines(axis, rows, index)
        pair[0].set_xlabel("steps")
        pair[1].set_xlabel("bytes that a worker sent")
        pair[1].set_xscale("log")
        pair[1].xaxis.set_major_formatter(EngFormatter(unit="B"))
        pair[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def _draw_lines(axis, rows, index):
    """Plot curves over index 0 of their points (steps) or index 1 (bytes)."""
    axis.set_ylabel(rows[0]["metric"])
    axis.grid(visible=True, color="0.93", zorder=0)
    styles = itertools.product(("-", "--", ":", "-."), plt.get_cmap("tab10").colors)
    for row, (style, color) in zip(rows, styles, strict=False):
        points = [(point[index], point[2]) for point in row["curve"]]
        axis.plot(
            *zip(*points, strict=True),
            linestyle=style,
            color=color,
            marker=".",
            label=row["method"],
        )
    losses = [point[2] for row in rows for point in row["curve"]]
    losses = [loss for loss in losses if math.isfinite(loss)] or [1]
    if rows[0]["metric"] == "loss" and max(losses) > 10 * min(losses):
        axis.set_yscale("log")  # diverging runs would hide the differences of others


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
        x, y = row["bytes_per_step"], row["value"]
        axis.errorbar(x, y, yerr=row["spread"], fmt=".", markersize=8, capsize=2)
        labels.append(axis.text(x, y, row["method"], fontsize=7))
    lines = {"arrowstyle": "-", "color": "0.7"}
    adjust_text(labels, ax=axis, expand=(1.3, 1.7), arrowprops=lines)
