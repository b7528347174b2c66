"""A page: HTML that needs no other file, of parts that are escaped as they are made."""

import html
import math
from collections.abc import Iterable, Sequence
from string import Template
from typing import Any

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
