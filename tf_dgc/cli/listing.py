"""`tf-dgc methods` and `tf-dgc collectives`: tables with the cost of each."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

SIZE = 1_000_000  # default number of entries
WORKERS = 8  # default number of workers
TABLES = pathlib.Path(__file__).with_name("tables.json")  # see `tables.py`

_KINDS = ("sparsification", "quantization", "low rank", "difference")  # others follow
_MAX_WIDTH = 100  # of paragraphs


@dataclasses.dataclass(frozen=True)
class MethodRow:
    """A method's facts, as they are printed."""

    name: str
    kind: str
    bytes_per_entry: str
    error_feedback: str
    reference: str
    state: str

    @property
    def short_reference(self) -> str:
        """Authors, venue and year."""
        parts = self.reference.split(", ")
        return self.reference if len(parts) < 3 else f"{parts[0]}, {parts[-1]}"


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """The costs of a collective algorithm, as they are printed."""

    name: str
    reduce_rounds: str
    reduce_sent: str
    gather_rounds: str
    gather_sent: str
    entries_rounds: str
    entries_sent: str
    reference: str


@dataclasses.dataclass(frozen=True)
class Tables:
    """The rows for the default options."""

    methods: list[MethodRow]
    collectives: list[CollectiveRow]


def read_tables() -> Tables:
    """Return the rows for the default options, without loading TensorFlow."""
    content = json.loads(TABLES.read_text(encoding="utf-8"))
    return Tables(
        [MethodRow(**row) for row in content["methods"]],
        [CollectiveRow(**row) for row in content["collectives"]],
    )


def print_methods(methods: Sequence[MethodRow], size: int) -> None:
    """Print the table of methods for float32 matrices of `size` entries."""
    width = _output_width()
    print(_RECOMMENDED)
    rows, columns = as_matrix(size)
    _print_paragraph(
        "All methods, with their defaults: tf_dgc.CompressedOptimizer(optimizer, "
        "NAME), or an object of tf_dgc.compressors, whose classes have help() pages. "
        f"Bytes are those sent per entry of a {rows} x {columns} float32 matrix. "
        "Feedback is whether entries that were not sent are added to the next "
        "gradient.",
        width,
    )
    full = [["name", "bytes", "feedback", "reference", "state"]]
    kinds = dict.fromkeys([*_KINDS, *(row.kind for row in methods)])
    order = {kind: i for i, kind in enumerate(kinds)}
    for kind, group in itertools.groupby(
        sorted(methods, key=lambda row: order[row.kind]), lambda row: row.kind
    ):
        full.append([f"{kind}:"])
        full += [
            [f"  {m.name}", m.bytes_per_entry, m.error_feedback, m.reference, m.state]
            for m in group
        ]
    short = {m.reference: m.short_reference for m in methods}
    for table in (
        full,
        [cells[:4] for cells in full],
        [[short.get(cell, cell) for cell in cells[:4]] for cells in full],
    ):
        text = _align(table)
        if _width(text) <= width:
            break
    print(text)


_RECOMMENDED = """\
Start with one of these two, which send the largest entries of the gradient
(Deep Gradient Compression, Lin et al., ICLR 2018):

  dgc            tf_dgc.DGCOptimizer(optimizer)
                 sends 0.1 % of the entries: for runs of 15,000 steps or more
  dgc_for_steps  tf_dgc.dgc_for_steps(optimizer, steps=3000)
                 sends more, the fewer steps there are: for all shorter runs

`tf-dgc advise MODEL` predicts which method is fastest for a model and links,
and whether compression pays at all.
"""


def print_collectives(rows: Sequence[CollectiveRow], num_workers: int) -> None:
    """Print the table of collective algorithms for some number of workers."""
    width = _output_width()
    _print_paragraph(
        "How the data of a step travels between workers: "
        'tf_dgc.DGCOptimizer(optimizer, collective=NAME). "ring" is the default. '
        '"auto" measures the links when training begins, and chooses among the '
        "others. Those that merge DGC's entries on the way (gtopk, oktopk, twoway) "
        "help with many workers.",
        width,
    )
    _print_paragraph(
        f"For {num_workers} workers: rounds of messages, and what the busiest worker "
        "sends, as a multiple of one worker's data, in an all-reduce, an all-gather, "
        "and for DGC's entries.",
        width,
    )
    full = [
        ["", "reduce", "", "gather", "", "DGC", ""],
        ["name", *["rounds", "sent"] * 3, "reference"],
        *(list(dataclasses.astuple(row)) for row in rows),
    ]
    text = _align(full)
    if _width(text) > width:
        text = _align([cells[:7] for cells in full])
        text += "\n\nA wider terminal also shows the references."
    print(text)


def text_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return an aligned table with a header."""
    return _align([columns, *rows])


def _align(rows: Sequence[Sequence[str]]) -> str:
    """Return lines of aligned cells; a row of one cell does not widen its column."""
    columns = itertools.zip_longest(*(r for r in rows if len(r) > 1), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=False)
        ).rstrip()
        for row in rows
    )


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))


def _output_width() -> int:
    """Return the terminal's width, or a large number for a file or a pipe."""
    is_limited = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return shutil.get_terminal_size().columns if is_limited else 10_000


def _print_paragraph(text: str, width: int) -> None:
    print(textwrap.fill(text, min(width, _MAX_WIDTH)) + "\n")


def as_matrix(size: int) -> tuple[int, int]:
    """Return the most square shape with `size` entries."""
    rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
    return rows, size // rows
