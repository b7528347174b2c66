"""Computes and draws the time of a step by the speed of the links.

A step of two workers takes the local time, a collective's latency per request, and the
bytes divided by the speed. In a gather each worker sends its payload once. In a ring
sum of N workers each sends 2 (N - 1) / N payloads, which for two workers is the same.
"""

import itertools

import matplotlib as mpl

mpl.use("agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter

LATENCY_MS = 2.0  # of a TensorFlow collective on loopback
SPEEDS = np.geomspace(1e7, 1e10, 301)  # bits per second
_LABEL_LINE = {
    "arrowstyle": "-",
    "color": "0.8",
    "linewidth": 0.5,
    "relpos": (0, 0.5),
}
_GAP = 0.021  # between labels, as a share of the picture's height


def step_ms(row, speed):
    """Return the milliseconds of one step.

    Args:
        row: a row of `methods.py`.
        speed: bits per second.
    """
    latency_ms = LATENCY_MS * row["requests"]
    return row["step_2_ms"] + latency_ms + 8000 * row["bytes_per_step"] / speed


def fastest(rows):
    """Return (method, from, to) of each range of speeds, in bits per second."""
    rows = [row for row in rows if "requests" in row]
    if not rows:
        return []
    best = np.argmin([step_ms(row, SPEEDS) for row in rows], axis=0)
    starts = [0, *np.flatnonzero(np.diff(best)) + 1, len(SPEEDS)]
    return [
        (rows[best[a]]["method"], SPEEDS[a], SPEEDS[min(b, len(SPEEDS) - 1)])
        for a, b in itertools.pairwise(starts)
    ]


def describe_fastest(rows):
    """Return a sentence with the fastest method of each range of speeds."""
    unit = EngFormatter(unit="bit/s", places=0)
    parts = [f"`{name}` from {unit(a)} to {unit(b)}" for name, a, b in fastest(rows)]
    return f"The fastest step of two workers: {', '.join(parts) or 'none'}."


def draw(rows, path):
    """Draw a panel per set of shapes; methods that are fastest somewhere are colored.

    Args:
        rows: rows of `methods.py`.
        path: file of the picture; its extension determines the format.
    """
    shapes = list(dict.fromkeys(row["shapes"] for row in rows))
    figure, axes = plt.subplots(
        len(shapes), 1, figsize=(10, 9 * len(shapes)), squeeze=False
    )
    for (axis,), name in zip(axes, shapes, strict=True):
        group = [row for row in rows if row["shapes"] == name]
        _draw_panel(axis, [row for row in group if "requests" in row])
        first = group[0]
        axis.set_title(
            f"{first['variables']} variables, {first['parameters']:,} parameters, "
            "two workers, forward and backward pass left out"
        )
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _draw_panel(axis, rows):
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(SPEEDS[0], SPEEDS[-1])
    axis.xaxis.set_major_formatter(EngFormatter(unit="bit/s"))
    axis.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axis.set_xlabel("speed of the links")
    axis.set_ylabel("step")
    axis.grid(visible=True, color="0.93", zorder=0)
    best = list(dict.fromkeys(name for name, *_ in fastest(rows)))
    colors = {"none": "black"} | {n: f"C{i}" for i, n in enumerate(best)}
    for row in rows:
        color = colors.get(row["method"])
        axis.plot(
            SPEEDS,
            step_ms(row, SPEEDS) / 1000,
            color=color or "0.75",
            linewidth=2 if color else 0.8,
            zorder=2 if color else 1,
        )
    _draw_labels(axis, rows, colors)


def _draw_labels(axis, rows, colors):
    """Draw the names of the lines at their right ends, in the order of the ends."""
    axis.autoscale_view()  # fixes the limits before heights are computed
    rows = sorted(rows, key=lambda row: step_ms(row, SPEEDS[-1]))
    to_axes = axis.transAxes.inverted()
    ends = [(SPEEDS[-1], step_ms(row, SPEEDS[-1]) / 1000) for row in rows]
    heights = [to_axes.transform(axis.transData.transform(end))[1] for end in ends]
    for row, end, height in zip(rows, ends, _spread(heights), strict=True):
        name = row["method"]
        axis.annotate(
            name,
            end,
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=colors.get(name, "0.4"),
            fontweight="bold" if name in colors else "normal",
            arrowprops=_LABEL_LINE,
        )


def _spread(heights):
    """Move ascending heights apart by the gap of labels, within the panel."""
    result = []
    lowest = -np.inf
    for height in heights:
        result.append(max(height, lowest))
        lowest = result[-1] + _GAP
    highest = max(1.0, _GAP * len(result))
    for i in reversed(range(len(result))):
        result[i] = min(result[i], highest)
        highest = result[i] - _GAP
    return result
