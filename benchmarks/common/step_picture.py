"""The picture of `step.py`: steps against the rate of their links."""

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import EngFormatter


def draw_steps(rows, path):
    """Draw a step's median against the measured rate of its links.

    Args:
        rows: rows of `step.py` with limited rates.
        path: file of the picture; its extension determines the format.
    """
    figure, axis = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(EngFormatter(unit="bit/s"))
    axis.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axis.set_xlabel("rate of the links, as measured")
    axis.set_ylabel("step (median)")
    axis.grid(visible=True, color="0.93", zorder=0)
    for mode in dict.fromkeys(row["mode"] for row in rows):
        points = sorted(
            (1e6 * row["measured_mbit"], row["median_ms"] / 1000)
            for row in rows
            if row["mode"] == mode
        )
        style = {"color": "0.5", "linestyle": "--"} if mode == "none" else {}
        label = "no communication" if mode == "none" else mode
        axis.plot(*zip(*points, strict=True), marker="o", label=label, **style)
    axis.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)
