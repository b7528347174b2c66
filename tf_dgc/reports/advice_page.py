"""The page of advice: what each way to train is predicted to take."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tf_dgc.reports import page
from tf_dgc.reports.page import Bars, Curve, Panel


class AdviceInput(NamedTuple):
    """What a page is made of.

    Attributes:
        title: text of its head.
        sentences: texts that say what to do.
        rows: dictionaries as `Advice.rows` has them.
        rates: bandwidths of the curves, in bits per second.
        by_rate: seconds of a step at these bandwidths, by number of workers and way to
            train.
        links: names and values of the numbers of the links.
    """

    title: str
    sentences: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    rates: Sequence[float]
    by_rate: Mapping[int, Mapping[str, Sequence[float]]]
    links: Mapping[str, str]


def advice_page(given: AdviceInput) -> str:
    """Return the page.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    page.check_pictures()
    parts = [page.paragraph(sentence) for sentence in given.sentences]
    parts += [page.heading("Predicted"), _table(given.rows), *_bars(given.rows)]
    parts += [*_curves(given), page.heading("Links")]
    parts.append(page.table(["", ""], list(given.links.items())))
    return page.page(given.title, parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = ["workers", "method", "exchange", "step", "of dense"]
    columns += ["examples/s", "bytes sent"]
    cells = [
        [
            str(row["workers"]),
            row["method"],
            row["exchange"],
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
        some = [row for row in rows if row["workers"] == number]
        of_step = [
            Bars("step", [row["step_ms"] / 1000 for row in some]),
            Bars("of that without the exchange", [r["alone_ms"] / 1000 for r in some]),
        ]
        names = [r["method"] + (" *" if r["advised"] else "") for r in some]
        svg = page.bars(names, of_step, "a step", f"bars {number}", "s")
        yield page.figure(svg, f"A step of {number} workers; * is what is advised.")


def _curves(given: AdviceInput) -> Iterable[str]:
    panels = [
        Panel(
            f"bandwidth ({number} workers)",
            "a step",
            [Curve(name, given.rates, y) for name, y in some.items()],
            *("bit/s", "s", "xy"),
        )
        for number, some in given.by_rate.items()
    ]
    for i in range(0, len(panels), 3):
        yield page.figure(
            page.curves(panels[i : i + 3], f"curves {i}"),
            "A step by the bandwidth of a worker's link, all else as above.",
        )
