"""Parts of self-contained HTML pages: text, tables and figures."""

import html
import io
import math
import re
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
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd;
  --muted: #555; --code: #f4f4f4; --marked: #e3f1de; --grid: #e4e4e4; $light }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --page: #1b1c1f;
  --line: #3c3e43; --muted: #a5a7ab; --code: #26282c; --marked: #26402a;
  --grid: #34363b; $dark } }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text);
  background: var(--page); max-width: 1100px; margin: 1.5em auto; padding: 0 1em;
  overflow-wrap: break-word; }
h1 { font-size: 1.5em; line-height: 1.25; } h2 { font-size: 1.15em; margin-top: 2em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; background: var(--page); }
.wrap td { white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0.3em;
  position: sticky; left: 0; }
tr.marked > * { background: var(--marked); }
figure { margin: 1em 0; min-width: 0; }
figcaption { color: var(--muted); margin-top: 0.3em; }
.panels, .columns { display: grid; gap: 0.5em 1em;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); }
.columns { gap: 0 3em;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
.columns > * { min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: currentColor; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.4em; font-size: 13px;
  margin-bottom: 0.4em; }
.key { display: inline-block; width: 2em; margin-right: 0.5em;
  vertical-align: middle; }
.bars { font-size: 13px; line-height: 1.3; }
.bars .label { margin-top: 0.5em; }
.bar { display: inline-block; height: 0.75em; min-width: 1px;
  margin-right: 0.5em; vertical-align: middle; }
pre { background: var(--code); padding: 0.8em; overflow-x: auto; font-size: 13px; }
summary { cursor: pointer; }
@media (max-width: 600px) { th, td { padding: 0.2em 0.4em; font-size: 13px; } }
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
    return _PAGE.substitute(
        title=html.escape(title),
        body="\n".join(parts),
        light=_color_variables(_LIGHT),
        dark=_color_variables(_DARK),
    )


def _color_variables(colors: Sequence[str]) -> str:
    return " ".join(f"--color{i}: {color};" for i, color in enumerate(colors))


def is_default_name(model: str) -> bool:
    """Return whether a model's name is one that Keras chose, such as "sequential_1"."""
    return re.fullmatch(r"(functional|sequential|model)(_\d+)?", model) is not None


def heading(text: str) -> str:
    """Return the heading of a section."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def figure(content: str, caption: str) -> str:
    """Return a figure with a caption."""
    text = html.escape(caption)
    return f"<figure>\n{content}\n<figcaption>{text}</figcaption></figure>"


def columns(parts: Iterable[str]) -> str:
    """Return parts in two columns, or in one on a narrow screen."""
    cells = "\n".join(f"<div>{part}</div>" for part in parts)
    return f'<div class="columns">\n{cells}\n</div>'


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    marked: Sequence[int] = (),
    wrap: bool = False,
) -> str:
    """Return a table.

    `marked` are the indices of highlighted rows; `wrap` breaks the lines of cells
    before a wide table scrolls.
    """
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    lines = [
        f"<tr{' class=marked' if i in marked else ''}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for i, row in enumerate(rows)
    ]
    body = "\n".join(lines)
    classes = "scroll wrap" if wrap else "scroll"
    return (
        f'<div class="{classes}"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


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


def milliseconds(value: float | None) -> str:
    """Return a number of milliseconds as text."""
    return "-" if value is None else f"{value:,.1f} ms"


def number(value: Any) -> str:
    """Return a number as text: ints with all digits, floats with four; "-" for none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


_LIGHT = (  # colors of curves and bars, in order
    *("#1f6fb4", "#d95f02", "#2c8c2c", "#c0282d", "#7e57b5"),
    *("#7a4a3e", "#c2549b", "#666666", "#8a8b00", "#0a8fa3"),
)
_DARK = (
    *("#6cb2f0", "#ffa24d", "#6fce6f", "#ff7b7b", "#b99be6"),
    *("#c9a08f", "#f09ad0", "#b0b0b0", "#d6d75a", "#4fd3e3"),
)
_AXES_COLOR, _GRID_COLOR = "#010101", "#e4e4e4"
_CSS_COLORS = {
    **{color: f"var(--color{i})" for i, color in enumerate(_LIGHT)},
    _AXES_COLOR: "currentColor",
    _GRID_COLOR: "var(--grid)",
}
_COLOR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})")
_SIZE = 3.8, 2.7  # inches of a panel
_MAX_TICKS = 6  # per axis
_STEPS = [1, 2, 2.5, 5, 10]  # between ticks, times a power of ten
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text
    "text.parse_math": False,  # names may contain dollar signs
    "axes.formatter.useoffset": False,
    "axes.facecolor": "none",
    "axes.edgecolor": _AXES_COLOR,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _AXES_COLOR,
    "xtick.labelcolor": "black",  # text has the color of the page's text
    "ytick.color": _AXES_COLOR,
    "ytick.labelcolor": "black",
    "grid.color": _GRID_COLOR,
    "figure.facecolor": "none",
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
    log: str = ""  # axes that are logarithmic if their values span a decade: "xy"


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
    """Return panels side by side, each an SVG; `name` must be unique within a page."""
    keys: dict[str, str] = {}
    for panel in panels:
        for i, curve in enumerate(panel.curves):
            color = i if curve.color is None else curve.color
            line = "dashed" if curve.style == "--" else "solid"
            keys.setdefault(curve.label, _key(f"2px {line}", color))
    cells = []
    for i, panel in enumerate(panels):
        text = html.escape(f"{panel.y_label} against {panel.x_label}")
        svg = _svg(panel, f"{name} {i}")
        cells.append(f'<div role="img" aria-label="{text}">{svg}</div>')
    rows = "\n".join(cells)
    return f'{_legend(keys)}<div class="panels">\n{rows}</div>'


def bars(
    labels: Sequence[str],
    groups: Sequence[Bars],
    text: Callable[[float | None], str] = size,
) -> str:
    """Return horizontal bars, one group per label, with their values as text."""
    longest = max((v for g in groups for v in g.values if v), default=1)
    keys = {g.label: _key("0.7em solid", i) for i, g in enumerate(groups)}
    lines = []
    for i, label in enumerate(labels):
        lines.append(f'<div class="label">{html.escape(label)}</div>')
        for color, group in enumerate(groups):
            value = group.values[i]
            bar = _bar((value or 0) / longest, color)
            lines.append(f"<div>{bar}{html.escape(text(value))}</div>")
    rows = "\n".join(lines)
    return f'<div class="bars">{_legend(keys)}{rows}</div>'


def _bar(share: float, color: int) -> str:
    width = f"calc({share:.4f} * (100% - 6.5em))"  # leaves space for the value
    css = f"width: {width}; background: var(--color{color % len(_LIGHT)})"
    return f'<span class="bar" style="{css}"></span>'


def _key(border: str, color: int) -> str:
    css = f"border-top: {border} var(--color{color % len(_LIGHT)})"
    return f'<span class="key" style="{css}"></span>'


def _legend(keys: dict[str, str]) -> str:
    """Return the legend of more than one label, given the key of each."""
    if len(keys) < 2:
        return ""
    entries = [f"<span>{key}{html.escape(label)}</span>" for label, key in keys.items()]
    return f'<div class="legend">{"".join(entries)}</div>\n'


def _draw(axes: Any, panel: Panel) -> None:
    for i, curve in enumerate(panel.curves):
        y = [float("nan") if value is None else value for value in curve.y]
        color = _LIGHT[(i if curve.color is None else curve.color) % len(_LIGHT)]
        marker = "." if len(y) <= 30 else ""
        axes.plot(curve.x, y, curve.style, marker=marker, color=color, lw=1.5)
    for axis, unit in (("x", panel.x_unit), ("y", panel.y_unit)):
        log = axis in panel.log and _spans_decade(panel, axis)
        if log:
            axes.set(**{f"{axis}scale": "log"})
        elif axis in panel.log:
            axes.update_datalim([(0, 0)], updatex=axis == "x", updatey=axis == "y")
            axes.autoscale_view()
        _set_ticks(getattr(axes, f"{axis}axis"), unit, log)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)


def _spans_decade(panel: Panel, axis: str) -> bool:
    values = [v for curve in panel.curves for v in getattr(curve, axis)]
    known = [value for value in values if value is not None]
    return bool(known) and 0 < 10 * min(known) <= max(known)


def _set_ticks(axis: Any, unit: str | None, log: bool) -> None:
    from matplotlib import ticker

    if log:
        low, high = axis.get_data_interval()
        factors = (1, 2, 5) if high < 100 * low else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=factors, numticks=_MAX_TICKS))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.12g}"))
    else:
        axis.set_major_locator(ticker.MaxNLocator(_MAX_TICKS - 1, steps=_STEPS))
    if unit is not None:
        axis.set_major_formatter(ticker.EngFormatter(unit))


def _svg(panel: Panel, name: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        _draw(figure.subplots(), panel)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]  # without the XML header of a separate file
    return _COLOR.sub(_css_color, text)


def _css_color(match: re.Match) -> str:
    """Return a color that follows the page's light or dark mode."""
    return f"{match[1]}: {_CSS_COLORS.get(match[2], match[2])}"
