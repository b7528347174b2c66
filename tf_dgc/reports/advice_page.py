"""The HTML page of `tf-dgc advise`: predicted steps of each method."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tf_dgc.reports import page
from tf_dgc.reports.page import Bars, Curve, Panel


def advice_page(
    title: str,
    sentences: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    rates: Sequence[float],
    seconds: Mapping[int, Mapping[str, Sequence[float]]],
    links: Mapping[str, str],
) -> str:
    """Return the page; `rates` in bits/s, `seconds` at these by workers and method."""
    page.check_figures()
    parts = [page.paragraph(sentence) for sentence in sentences]
    parts += [page.heading("Predicted"), _table(rows), *_bars(rows)]
    parts += [*_curves(rates, seconds), page.heading("Links")]
    parts.append(page.table(["", ""], list(links.items())))
    return page.page(title, parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = ["workers", "method", "collective", "step", "of dense"]
    columns += ["examples/s", "bytes sent"]
    cells = [
        [
            str(row["workers"]),
            row["method"],
            row["collective"],
            f"{row['step_ms']:,.1f} ms",
            f"{row['of_dense']:.2f}",
            f"{row['examples_per_second']:,.0f}",
            page.size(row["sent_bytes"]),
        ]
        for row in rows
    ]
    return page.table(columns, cells, [i for i, r in enumerate(rows) if r["advised"]])


def _bars(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for number in dict.fromkeys(row["workers"] for row in rows):
        group = [row for row in rows if row["workers"] == number]
        bars = [
            Bars("step", [row["step_ms"] / 1000 for row in group]),
            Bars("of that without the exchange", [r["alone_ms"] / 1000 for r in group]),
        ]
        names = [r["method"] + (" *" if r["advised"] else "") for r in group]
        svg = page.bars(names, bars, "a step", f"bars {number}", "s")
        yield page.figure(svg, f"A step of {number} workers; * marks the advice.")


def _curves(
    rates: Sequence[float], seconds: Mapping[int, Mapping[str, Sequence[float]]]
) -> Iterable[str]:
    panels = [
        Panel(
            x_label=f"bandwidth ({number} workers)",
            y_label="a step",
            curves=[Curve(name, rates, y) for name, y in by_method.items()],
            x_unit="bit/s",
            y_unit="s",
            log="xy",
        )
        for number, by_method in seconds.items()
    ]
    for i in range(0, len(panels), 3):
        yield page.figure(
            page.curves(panels[i : i + 3], f"curves {i}"),
            "A step by the bandwidth of a worker's link; the rest as above.",
        )
