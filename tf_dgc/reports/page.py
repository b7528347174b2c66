"""Parts of self-contained HTML pages: text, tables and SVG figures."""

import html
import io
import math
from collections.abc import Callable, Iterable, Sequence
from string import Template
from typing import Any, NamedTuple

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
tr.marked { background: #e9f3e6; }
figure { margin: 1em 0; } svg { max-width: 100%; height: auto; }
figcaption { color: #555; }
pre { background: #f6f6f6; padding: 0.8em; overflow-x: auto; font-size: 13px; }
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


def page(title: str, parts: Iterable[str]) -> str:
    """Return a page with parts that the functions below return."""
    return _PAGE.substitute(title=html.escape(title), body="\n".join(parts))


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def figure(svg: str, caption: str) -> str:
    """Return an SVG with a caption."""
    text = html.escape(caption)
    return (
        f'<figure role="img" aria-label="{text}">\n{svg}'
        f"<figcaption>{text}</figcaption></figure>"
    )


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], marked: Sequence[int] = ()
) -> str:
    """Return a table; `marked` are the indices of highlighted rows."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    lines = [
        f"<tr{' class=marked' if i in marked else ''}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for i, row in enumerate(rows)
    ]
    body = "\n".join(lines)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def folded(summary: str, text: str) -> str:
    """Return text that is shown when the summary is clicked."""
    return (
        f"<details><summary>{html.escape(summary)}</summary>"
        f"<pre>{html.escape(text)}</pre></details>"
    )


def size(num_bytes: float | None) -> str:
    """Return a number of bytes as text with a unit."""
    if num_bytes is None:
        return "-"
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * factor:  # rounds to 1
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Return a number of seconds as text with units."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def number(value: Any) -> str:
    """Return a number as text: ints with all digits, floats with four; "-" for none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


_WIDTH, _HEIGHT = 4.2, 2.9  # inches of a panel
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text
    "text.parse_math": False,  # names may contain dollar signs
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "font.size": 9,
}


class Curve(NamedTuple):
    """A curve of a panel."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]  # y values; None for a gap
    style: str = "-"  # line style: "-" or "--"
    color: int | None = None  # index of the color; None for the curve's index


class Panel(NamedTuple):
    """A panel of a figure of curves."""

    x_label: str
    y_label: str
    curves: Sequence[Curve]
    x_unit: str | None = None  # gets prefixes k, M and G; None: plain numbers
    y_unit: str | None = None  # unit on the y axis, likewise
    log: str = ""  # logarithmic axes: "", "x", "y" or "xy"


class Bars(NamedTuple):
    """Bars of one color, one per label."""

    label: str
    values: Sequence[float | None]  # lengths; None for no bar


def check_figures() -> None:
    """Raise `ImportError` unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Figures need matplotlib: pip install 'tf_dgc[report]'"
        ) from error


def curves(panels: Sequence[Panel], name: str) -> str:
    """Return panels side by side, as SVG; `name` must be unique within a page."""

    def draw(all_axes: list) -> None:
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw(axes, panel)

    return _svg((_WIDTH * len(panels), _HEIGHT), name, len(panels), draw)


def bars(
    labels: Sequence[str],
    groups: Sequence[Bars],
    x_label: str,
    name: str,
    unit: str | None = None,
    log: bool = False,
) -> str:
    """Return horizontal bars, one group per label from the top, as SVG."""
    thickness = 0.8 / len(groups)

    def draw(all_axes: list) -> None:
        (axes,) = all_axes
        for i, group in enumerate(groups):
            shift = (i - (len(groups) - 1) / 2) * thickness
            y = [j + shift for j in range(len(labels))]
            values = [value or 0 for value in group.values]
            axes.barh(y, values, thickness, label=group.label, color=f"C{i}")
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        _finish(axes, x_label, "", unit, None, "x" if log else "")

    height = 0.9 + 0.16 * (len(groups) + 0.6) * len(labels)
    return _svg((2 * _WIDTH, height), name, 1, draw)


def _draw(axes: Any, panel: Panel) -> None:
    for i, curve in enumerate(panel.curves):
        y = [float("nan") if value is None else value for value in curve.y]
        color = f"C{i if curve.color is None else curve.color}"
        marker = "." if len(y) <= 30 else ""
        axes.plot(
            curve.x,
            y,
            curve.style,
            marker=marker,
            color=color,
            label=curve.label,
            lw=1.3,
        )
    _finish(axes, panel.x_label, panel.y_label, panel.x_unit, panel.y_unit, panel.log)


def _finish(
    axes: Any,
    x_label: str,
    y_label: str,
    x_unit: str | None,
    y_unit: str | None,
    log: str,
) -> None:
    from matplotlib.ticker import EngFormatter

    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    for axis, unit in ((axes.xaxis, x_unit), (axes.yaxis, y_unit)):
        if unit is not None:
            axis.set_major_formatter(EngFormatter(unit))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize="small", framealpha=0.7)


def _svg(
    size: tuple[float, float], name: str, num_axes: int, draw: Callable[[list], None]
) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(list(figure.subplots(1, num_axes, squeeze=False)[0]))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]  # without the XML header of a separate file
