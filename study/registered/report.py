"""The page about the runs that are kept, in Markdown and HTML, with pictures."""

import collections
import pathlib

import markdown
from experiments import time_to_accuracy

from registered import comparison, pictures, plan, plan_page, tables
from registered.plan_page import markdown as table
from registered.rows import has_value

_QUESTION = """\
Does `DGCOptimizer` at 99.9 %, with the recipe of the dense run and the paper's warm-up
and nothing else, train as well as dense float32? Means of runs in pairs, by seed, and
the mean difference with its 95 % interval; the margins were set before the runs, for
CIFAR-10 and PTB. All methods are [below](#how-to-read-this)."""
_CAVEAT = """\
CIFAR-10 here is a rebuilt copy: 87 of the 60,000 images (86 of train, 1 of test) are
from a JPEG copy, the others exact. All workers are simulated in one process; there are
as many gradients, residuals and collectives as with real ones, and no network. Methods
that are compared had the same seeds: the same initial weights, and the same data in the
same order. Every figure is the last of its run; none was chosen. The margin was set for
`dgc` alone; what else is compared is exploratory.

An interval is that of the mean paired difference, 95 % by Student. Where seeds were
added on CIFAR-10 until it was narrow, it holds the mean less often. If pairs deviate by
0.3 to 0.4 points, that is in 93 to 94 % of studies, and in 84 to 92 % of those that
stop before the tenth seed (by simulation, `python study/evidence.py coverage`).

"Handed to collectives" is what one worker gives of its own: the whole vector to an
all-reduce, one payload to an all-gather. Links carry other amounts. On a ring of N
workers each sends 2 (N - 1)/N of the vector, and N - 1 payloads; so for what is
gathered the ratio on a ring is 2/N of that of the bytes handed over."""
_PAPERS = """\
The paper counts 6 bytes per entry sent, one-dimensional tensors whole, after warm-up.
Ratios above that are not `at the end` are of a whole run."""
_STYLE = """\
body {font-family: sans-serif; max-width: 60em; margin: 2em auto; line-height: 1.4}
table {border-collapse: collapse} td, th {border: 1px solid #ccc; padding: 0.2em 0.6em}
td {text-align: right} img {max-width: 100%}"""


def write(rows, out, timed=()):
    """Write `report.md`, `report.html` and the pictures.

    Args:
        rows: rows that are kept.
        out: folder of the pages.
        timed: rows of `time_to_accuracy.py`.
    """
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    old = [row for row in rows if plan.superseded(row)]
    rows = [row for row in rows if row not in old]
    found = comparison.comparisons(rows)
    parts = [
        "# Does it train as well?",
        *(_QUESTION, tables.answers(found)),
        *("## How to read this", _counted(rows), _CAVEAT),
        *(_with_picture(c, out) for c in found),
        _over_links(timed, out),
        *_beside_papers(found),
        *("## Failures", _failures(rows)),
        _superseded(old),
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


def _counted(rows):
    starts = sorted(row["started"] for row in rows)
    dates = f"{starts[0][:10]} to {starts[-1][:10]}" if rows else "no date"
    hours = sum(row["seconds"] or 0 for row in rows) / 3600
    return f"{len(rows)} runs begun from {dates}, {hours:.1f} hours. {_commits(rows)}"


def _commits(rows):
    """Return a sentence about the commits that these rows are of."""
    found = collections.Counter(
        ", then ".join(map(_short, [row["commit"], *row.get("resumed_at", [])]))
        for row in rows
    )
    if len(found) < 2:
        return "".join(f"All are of commit {name}." for name in found)
    counted = "; ".join(f"{number} of {name}" for name, number in sorted(found.items()))
    return f"Runs of several commits are together here: {counted}."


def _short(commit):
    """Return the beginning of a commit, and whether files differed from it."""
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _with_picture(found, out):
    title = tables.title(found)
    name = f"{title.lower().replace(' ', '-').replace(',', '')}.svg"
    pictures.draw(found, out / name)
    parts = [f"## {title}", _commits(found.rows), tables.methods(found)]
    parts += [tables.pairs(found), f"![{title}]({name})"]
    return "\n\n".join(filter(None, parts))


def _beside_papers(found):
    table = tables.beside_papers(found)
    return ("## Beside Lin et al. (2018)", table, _PAPERS) if table else ()


def _failures(rows):
    failed = [
        f"- `{row['command']}`: {row.get('error', 'no value')}"
        for row in rows
        if not has_value(row)
    ]
    return "\n".join(failed) or "None."


def _superseded(rows):
    """Return what was run again by the recipe, or nothing."""
    lines = [f"- `{row['command']}`: {row['metric']} {row['value']}" for row in rows]
    title = "## Not counted: clipped more tightly than the recipe says\n\n"
    return title + "\n".join(lines) if rows else ""


_TEXT = """\
Here workers are processes, and links are real: network namespaces, whose rate is
limited (`study/time_to_accuracy.py`). Seconds until the test set's accuracy is
half a point less than the dense run's at its end: means over seeds, of methods that
came to it in all runs. `dgc` is `dgc_for_steps`, `dense` stock Keras."""


def _over_links(rows, out):
    """Return the table and the picture as Markdown, or nothing without a row.

    Args:
        rows: rows of `time_to_accuracy.py`.
        out: folder of the picture.
    """
    if not rows:
        return ""
    shown = time_to_accuracy.compared(rows, time_to_accuracy.TOLERANCE)
    name = "over-links.svg"
    pictures.draw_over_time(shown, out / name)
    lines = [_line(row) for row in time_to_accuracy.summaries(shown)]
    headings = ["task", "rate", "method", "seeds", "accuracy %", "to dense, points"]
    headings += ["s to target", "dense's time by its", "processor"]
    picture = f"![accuracy against time]({name})"
    title = "## Time to an accuracy, over real links"
    return "\n\n".join([title, _TEXT, table(headings, lines), picture])


def _line(row):
    never = f"{row['reached']} of {row['runs']} came to it"
    return [
        *(row[name] for name in ("task", "rate", "mode", "runs")),
        f"{100 * row['value']:.2f}" if "value" in row else f"{row['failures']} failed",
        _difference(row),
        f"{row['target_seconds']:,.1f}" if "target_seconds" in row else never,
        _times(row),
        row["processor"],
    ]


def _difference(row):
    if "to_dense" not in row:
        return ""
    half = row["half_width"]  # None of one seed
    interval = "" if half is None else f" ± {100 * half:.2f}"
    return f"{100 * row['to_dense']:+.2f}{interval}"


def _times(row):
    if "times" not in row:
        return ""
    ends = [row[name] for name in ("times_least", "times_most") if name in row]
    within = " ({:.2f} to {:.2f})".format(*ends) if ends else ""
    return f"{row['times']:.2f}{within}"
