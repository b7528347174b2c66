"""A page: HTML that needs no other file, of parts that are escaped as they are made."""

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
    """Return a page.

    Args:
        title: text of its head.
        parts: HTML, made by the functions below.
    """
    return _PAGE.substitute(title=html.escape(title), body="\n".join(parts))


def heading(text: str) -> str:
    """Return the head of a section."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def figure(svg: str, caption: str) -> str:
    """Return a picture with what it shows.

    Args:
        svg: SVG of `pictures`.
        caption: text below.
    """
    text = html.escape(caption)
    return (
        f'<figure role="img" aria-label="{text}">\n{svg}'
        f"<figcaption>{text}</figcaption></figure>"
    )


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], marked: Sequence[int] = ()
) -> str:
    """Return a table.

    Args:
        columns: names of the columns.
        rows: cells of each row.
        marked: numbers of rows that stand out.
    """
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
    """Return text that is shown when its summary is pressed."""
    return (
        f"<details><summary>{html.escape(summary)}</summary>"
        f"<pre>{html.escape(text)}</pre></details>"
    )


def size(num_bytes: float | None) -> str:
    """Return a number of bytes as people read it."""
    if num_bytes is None:
        return "-"
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * factor:  # which is rounded to 1
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Return a number of seconds as people read it."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def number(value: Any) -> str:
    """Return a number with four digits, a whole one with all; "-" for none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


# --- Pictures: curves and bars as SVG, to stand within a page.

_WIDTH, _HEIGHT = 4.2, 2.9  # inches of a panel
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names may have dollars
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "font.size": 9,
}


class Curve(NamedTuple):
    """A curve of a panel.

    Attributes:
        label: text of the legend.
        x: places.
        y: values; None where there is none.
        style: kind of line: "-" or "--".
        color: number of the color; None for that of its place.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: str = "-"
    color: int | None = None


class Panel(NamedTuple):
    """A panel of a picture of curves.

    Attributes:
        x_label: text below.
        y_label: text beside.
        curves: curves in it.
        x_unit: unit of what stands below, as "B", before which k, M and G come; None
            for plain numbers.
        y_unit: unit beside, likewise.
        log: axes of logarithms: "", "x", "y" or "xy".
    """

    x_label: str
    y_label: str
    curves: Sequence[Curve]
    x_unit: str | None = None
    y_unit: str | None = None
    log: str = ""


class Bars(NamedTuple):
    """Bars of one color, one per label.

    Attributes:
        label: text of the legend.
        values: lengths; None for no bar.
    """

    label: str
    values: Sequence[float | None]


def check_pictures() -> None:
    """Raise `ImportError` with what to do unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install 'tf_dgc[report]'"
        ) from error


def curves(panels: Sequence[Panel], name: str) -> str:
    """Return panels side by side, as SVG.

    Args:
        panels: panels, from the left.
        name: text that makes the names within it differ from those of other pictures.
    """

    def draw(some: list) -> None:
        for axes, panel in zip(some, panels, strict=True):
            _draw(axes, panel)

    return _svg((_WIDTH * len(panels), _HEIGHT), name, len(panels), draw)


def bars(
    labels: Sequence[str],
    some: Sequence[Bars],
    x_label: str,
    name: str,
    unit: str | None = None,
    log: bool = False,
) -> str:
    """Return bars that lie, in groups of one per label, as SVG.

    Args:
        labels: texts beside the groups, from the top.
        some: bars of each color.
        x_label: text below.
        name: see `curves`.
        unit: unit of the lengths, before which k, M and G come.
        log: whether lengths are of logarithms.
    """
    thick = 0.8 / len(some)

    def draw(axes: list) -> None:
        for i, part in enumerate(some):
            shift = (i - (len(some) - 1) / 2) * thick
            places = [j + shift for j in range(len(labels))]
            values = [value or 0 for value in part.values]
            axes[0].barh(places, values, thick, label=part.label, color=f"C{i}")
        axes[0].set_yticks(range(len(labels)), labels)
        axes[0].invert_yaxis()
        axes[0].grid(visible=False, axis="y")
        _finish(axes[0], x_label, "", unit, None, "x" if log else "")

    height = 0.9 + 0.16 * (len(some) + 0.6) * len(labels)
    return _svg((2 * _WIDTH, height), name, 1, draw)


def _draw(axes: Any, panel: Panel) -> None:
    for i, curve in enumerate(panel.curves):
        y = [float("nan") if value is None else value for value in curve.y]
        color = f"C{i if curve.color is None else curve.color}"
        few = "." if len(y) <= 30 else ""
        axes.plot(
            curve.x, y, curve.style, marker=few, color=color, label=curve.label, lw=1.3
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
    size: tuple[float, float], name: str, number: int, draw: Callable[[list], None]
) -> str:
    """Return a figure of so many axes side by side, on which is drawn."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(list(figure.subplots(1, number, squeeze=False)[0]))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]  # without what only a file of its own has
