"""The HTML page of `tf-dgc advise`: predicted steps of each method."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tf_dgc.reports import page
from tf_dgc.reports.page import Bars, Curve, Panel


def advice_page(
    model: str,
    batch_size: int,
    sentences: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    rates: Sequence[float],
    seconds: Mapping[int, Mapping[str, Sequence[float]]],
    links: Mapping[str, str],
) -> str:
    """Return the page; `rates` in bits/s, `seconds` at these by workers and method."""
    page.check_figures()
    parts = [page.paragraph(sentence) for sentence in sentences]
    parts += [page.heading("Predicted"), _table(rows), page.columns(_bars(rows))]
    parts += [*_curves(rates, seconds), page.heading("Links")]
    parts.append(page.table(["parameter", "value"], list(links.items())))
    name = f"a {model} model" if page.is_default_name(model) else model
    return page.page(f"Advice for {name}, batches of {batch_size} per worker", parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = ["workers", "method", "collective", "step", "of dense"]
    columns += ["examples/s", "bytes sent"]
    cells = [
        [
            str(row["workers"]),
            row["method"],
            row["collective"],
            page.milliseconds(row["step_ms"]),
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
            Bars("step", [row["step_ms"] for row in group]),
            Bars("of that without the exchange", [r["alone_ms"] for r in group]),
        ]
        names = [r["method"] + (" *" if r["advised"] else "") for r in group]
        figure = page.bars(names, bars, page.milliseconds)
        yield page.figure(figure, f"A step of {number} workers; * marks the advice.")


def _curves(
    rates: Sequence[float], seconds: Mapping[int, Mapping[str, Sequence[float]]]
) -> Iterable[str]:
    names = list(dict.fromkeys(name for y in seconds.values() for name in y))
    panels = [
        Panel(
            x_label=f"bandwidth ({number} workers), bit/s",
            y_label="time of a step",
            curves=[
                Curve(name, rates, y, color=names.index(name))
                for name, y in by_method.items()
            ],
            x_unit="",
            y_unit="s",
            log="xy",
        )
        for number, by_method in seconds.items()
    ]
    if panels:
        yield page.figure(
            page.curves(panels, "curves"),
            "A step by the bandwidth of a worker's link; the rest as above.",
        )
