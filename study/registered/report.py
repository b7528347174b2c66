"""Writes the report about the stored runs, in Markdown and HTML, with pictures."""

import collections
import pathlib

import markdown
from experiments import time_to_accuracy

from registered import comparisons, pictures, plan, plan_page, tables
from registered.plan_page import markdown as table
from registered.rows import has_value

_QUESTION = """\
Does `DGCOptimizer` at 99.9 %, with the recipe of the dense run, the paper's warm-up and
no other change, train as well as dense float32? The table has means over pairs of runs
with the same seed, and the mean difference with its 95 % interval. The margins for
CIFAR-10 and PTB were set before the runs. All methods follow
[below](#how-to-read-this)."""
_CAVEAT = """\
CIFAR-10 here is a rebuilt copy: 87 of the 60,000 images (86 of train, 1 of test) are
from a JPEG copy, the others are exact. All workers are simulated in one process, with
as many gradients, residuals and collectives as real workers have, and no network.
Compared runs have the same seeds: the same initial weights, and the same data in the
same order. Every figure is the last one of its run; none was selected. The margin was
set for `dgc` only; all other comparisons are exploratory.

Intervals are 95 % intervals (Student) of the mean paired difference. On CIFAR-10, seeds
were added until the interval was narrow, which lowers its coverage. If pairs deviate by
0.3 to 0.4 points, intervals cover the mean in 93 to 94 % of studies, and in 84 to 92 %
of those that stop before the tenth seed (`python study/evidence.py coverage` simulates
this).

"Handed to collectives" counts one worker's own contribution: the whole vector of an
all-reduce, one payload of an all-gather. Links carry other amounts. On a ring of N
workers, each sends 2 (N - 1)/N of the vector, or N - 1 payloads. So the ring ratio is
2/N of the ratio of handed bytes if all of them are gathered."""
_PAPERS = """\
The paper counts 6 bytes per sparse entry after warm-up, and one-dimensional tensors in
full. Ratios above are of a whole run, unless their column says `at the end`."""
_STYLE = """\
body {font-family: sans-serif; max-width: 60em; margin: 2em auto; line-height: 1.4}
table {border-collapse: collapse} td, th {border: 1px solid #ccc; padding: 0.2em 0.6em}
td {text-align: right} img {max-width: 100%}"""


def write(rows, out, timed=()):
    """Write `report.md`, `report.html` and the pictures.

    Args:
        rows: stored rows.
        out: folder of the pages.
        timed: rows of `time_to_accuracy.py`.
    """
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    superseded = [row for row in rows if plan.is_superseded(row)]
    rows = [row for row in rows if row not in superseded]
    all_comparisons = comparisons.from_rows(rows)
    parts = [
        "# Does it train as well?",
        _QUESTION,
        tables.answers(all_comparisons),
        "## How to read this",
        _dates_and_hours(rows),
        _CAVEAT,
        *(_section(comparison, out) for comparison in all_comparisons),
        _time_over_links(timed, out),
        *_against_papers(all_comparisons),
        "## Failures",
        _failures(rows),
        _superseded(superseded),
        "## The plan, and what changed",
        "[The plan](plan.md) was written before the first run, and has changed since:",
        plan_page.changes(),
    ]
    text = "\n\n".join(filter(None, parts))
    (out / "report.md").write_text(text + "\n", encoding="utf-8")
    body = markdown.markdown(text, extensions=["tables", "toc"])
    page = "<!doctype html><meta charset='utf-8'><title>Evidence</title>"
    page += f"<style>{_STYLE}</style>{body}"
    (out / "report.html").write_text(page + "\n", encoding="utf-8")


def _dates_and_hours(rows):
    starts = sorted(row["started"] for row in rows)
    dates = f"{starts[0][:10]} to {starts[-1][:10]}" if rows else "no date"
    hours = sum(row["seconds"] or 0 for row in rows) / 3600
    return f"{len(rows)} runs begun from {dates}, {hours:.1f} hours. {_commits(rows)}"


def _commits(rows):
    """Return a sentence about the commits of rows."""
    counts = collections.Counter(
        ", then ".join(map(_short, [row["commit"], *row.get("resumed_at", [])]))
        for row in rows
    )
    if len(counts) < 2:
        return "".join(f"All are of commit {name}." for name in counts)
    text = "; ".join(f"{number} of {name}" for name, number in sorted(counts.items()))
    return f"These runs are of several commits: {text}."


def _short(commit):
    """Return the first digits of a commit, and whether its files were modified."""
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _section(comparison, out):
    """Return the section of a comparison, and draw its picture."""
    title = tables.title(comparison)
    name = f"{title.lower().replace(' ', '-').replace(',', '')}.svg"
    pictures.draw(comparison, out / name)
    parts = [f"## {title}", _commits(comparison.rows), tables.methods(comparison)]
    parts += [tables.pairs(comparison), f"![{title}]({name})"]
    return "\n\n".join(filter(None, parts))


def _against_papers(all_comparisons):
    table = tables.against_papers(all_comparisons)
    return ("## Compared with Lin et al. (2018)", table, _PAPERS) if table else ()


def _failures(rows):
    failed = [
        f"- `{row['command']}`: {row.get('error', 'no value')}"
        for row in rows
        if not has_value(row)
    ]
    return "\n".join(failed) or "None."


def _superseded(rows):
    """Return the section about superseded runs, or ""."""
    lines = [f"- `{row['command']}`: {row['metric']} {row['value']}" for row in rows]
    title = "## Not counted: clipped more tightly than the recipe says\n\n"
    return title + "\n".join(lines) if rows else ""


_TIME_OVER_LINKS = """\
Here workers are processes in network namespaces, on links whose rate is limited
(`study/time_to_accuracy.py`). Seconds are until the test accuracy is at most half a
point below the final accuracy of the dense run: means over seeds, for methods that
reached it in all runs. `dgc` is `dgc_for_steps`, `dense` is stock Keras."""


def _time_over_links(rows, out):
    """Return the table and the picture as Markdown, or "" without a row.

    Args:
        rows: rows of `time_to_accuracy.py`.
        out: folder of the picture.
    """
    if not rows:
        return ""
    rows = time_to_accuracy.compared(rows, time_to_accuracy.TOLERANCE)
    name = "over-links.svg"
    pictures.draw_over_time(rows, out / name)
    lines = [_line(row) for row in time_to_accuracy.summaries(rows)]
    headings = ["task", "rate", "method", "seeds", "accuracy %", "vs. dense, points"]
    headings += ["seconds to target", "speedup over dense", "processor"]
    picture = f"![accuracy against time]({name})"
    title = "## Time to an accuracy, over real links"
    return "\n\n".join([title, _TIME_OVER_LINKS, table(headings, lines), picture])


def _line(row):
    not_reached = f"{row['reached']} of {row['runs']} reached it"
    return [
        *(row[name] for name in ("task", "rate", "mode", "runs")),
        f"{100 * row['value']:.2f}" if "value" in row else f"{row['failures']} failed",
        _difference(row),
        f"{row['target_seconds']:,.1f}" if "target_seconds" in row else not_reached,
        _times(row),
        row["processor"],
    ]


def _difference(row):
    if "to_dense" not in row:
        return ""
    half_width = row["half_width"]  # None for one seed
    interval = "" if half_width is None else f" ± {100 * half_width:.2f}"
    return f"{100 * row['to_dense']:+.2f}{interval}"


def _times(row):
    if "times" not in row:
        return ""
    interval = ""
    if "times_least" in row:
        interval = f" ({row['times_least']:.2f} to {row['times_most']:.2f})"
    return f"{row['times']:.2f}{interval}"
