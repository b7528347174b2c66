"""The page about the runs that are kept, in Markdown and HTML, with pictures."""

import collections
import itertools
import math
import pathlib

import markdown

from study import comparison, papers, pictures, plan, plan_page
from study.plan_page import markdown as table
from study.rows import has_value

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
stop before the tenth seed (by simulation, `python benchmarks/evidence.py coverage`).

"Handed to collectives" is what one worker gives of its own: the whole vector to an
all-reduce, one payload to an all-gather. Links carry other amounts. On a ring of N
workers each sends 2 (N - 1)/N of the vector, and N - 1 payloads; so for what is
gathered the ratio on a ring is 2/N of that of the bytes handed over.

[The plan](plan.md) was written before the first run, and has changed since:"""
_STYLE = """\
body {font-family: sans-serif; max-width: 60em; margin: 2em auto; line-height: 1.4}
table {border-collapse: collapse} td, th {border: 1px solid #ccc; padding: 0.2em 0.6em}
td {text-align: right} img {max-width: 100%}"""


def write(rows, out):
    """Write `report.md`, `report.html` and the pictures.

    Args:
        rows: rows that are kept.
        out: folder of the pages.
    """
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    old = [row for row in rows if plan.superseded(row)]
    rows = [row for row in rows if row not in old]
    found = comparison.comparisons(rows)
    drawn = [_with_picture(c, out) for c in found]
    parts = [
        _head(rows),
        plan_page.changes(),
        *drawn,
        _against_papers(found),
        _failures(rows),
        _superseded(old),
    ]
    text = "\n\n".join(filter(None, parts))
    (out / "report.md").write_text(text + "\n", encoding="utf-8")
    body = markdown.markdown(text, extensions=["tables"])
    page = "<!doctype html><meta charset='utf-8'><title>Evidence</title>"
    page += f"<style>{_STYLE}</style>{body}"
    (out / "report.html").write_text(page + "\n", encoding="utf-8")


def _head(rows):
    starts = sorted(row["started"] for row in rows)
    dates = f"{starts[0][:10]} to {starts[-1][:10]}" if rows else "no date"
    hours = sum(row["seconds"] or 0 for row in rows) / 3600
    intro = f"{len(rows)} runs begun from {dates}, {hours:.1f} hours. {_commits(rows)}"
    return f"# Does it train as well?\n\n{intro}\n\n{_CAVEAT}"


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
    name = f"{_title(found).lower().replace(' ', '-').replace(',', '')}.svg"
    pictures.draw(found, out / name)
    head = [f"## {_title(found)}", _commits(found.rows)]
    parts = [*head, _table(found), _ablation(found)]
    return "\n\n".join([*filter(None, parts), f"![{_title(found)}]({name})"])


def _title(found):
    model = (
        " with {blocks} blocks, stride {stride}".format(**found.model)
        if found.model
        else ""
    )
    return f"{found.task}{model}, {found.workers} workers"


def _table(found):
    _, unit, unit_of_difference = comparison.TASKS[found.task]
    lines = [
        [_named(found, label), *_accuracy(found, label), *_bytes(found, label)]
        for label in found.labels
    ]
    headings = ["method", "runs", "failed", f"{found.metric} {unit}".strip()]
    headings += ["pairs", "dense of these", f"to dense, {unit_of_difference}"]
    headings += ["margin", "MB handed to collectives", "ratio of these"]
    headings += ["at the end", "ratio on a ring", "at its end"]
    return table(headings, lines)


def _named(found, label):
    """Return a label, and what had been seen when it was added to the plan."""
    seen = plan.SEEN.get(label, {}).get(found.task, ())
    if not seen:
        return label
    seeds = " and ".join(map(str, seen))
    text = f"{label} (as it is since seed {seeds} was seen"
    led = plan.LED_TO.get(label, {}).get(found.task, ())
    if led:
        text += (
            f"; not of the pairs: seed {' and '.join(map(str, led))}, which led to it"
        )
    return text + ")"


def _accuracy(found, label):
    """Return runs, failures, the mean; and of the pairs dense's, and the difference.

    Both means are over the pairs, where there are any, as the difference is.
    """
    difference = found.difference(label)
    counts = len(found.of(label)), len(difference.failed)
    if label == "dense":
        return [*counts, _number(found.mean(label), ".2f"), "", "", "", ""]
    seeds = difference.seeds
    return [
        *counts,
        _number(found.mean(label, seeds or None), ".2f"),
        len(seeds),
        _number(found.mean("dense", seeds), ".2f"),
        _interval(difference),
        found.verdict(label),
    ]


def _bytes(found, label):
    sent = found.sent(label)
    both = "dense", label
    whole = [found.sent(each) for each in both]
    late = [found.sent_at_end(each) for each in both]
    pairs = list(zip(both, whole, late, strict=True))
    return [
        _number(sent and sent / 1e6, ",.2f"),
        _ratio(*whole),
        _ratio(*late),
        _ratio(*(found.on_a_ring(each, handed) for each, handed, _ in pairs)),
        _ratio(*(found.on_a_ring(each, handed, 1) for each, _, handed in pairs)),
    ]


def _ablation(found):
    """Return what each addition of DGC brings, after the one before."""
    labels = [label for label in plan.ABLATION if found.of(label)]
    if len(labels) < 2:
        return ""
    lines = []
    for before, label in itertools.pairwise(labels):
        step = found.difference(label, before)
        verdict = "yes" if step.separates else "no"
        if step.failed:
            verdict = f"failed in {len(step.failed)}"
        lines.append([label, before, len(step.seeds), _interval(step), verdict])
    headings = ["with", "after", "pairs", "difference, points", "separate"]
    return table(headings, lines)


def _against_papers(found):
    lines = []
    for c in found:
        if c.task == "cifar10" and c.workers in papers.CIFAR10:
            theirs = papers.CIFAR10[c.workers], "ResNet-110, 164 epochs, one seed"
        elif c.task == "ptb" and c.workers == 4:
            theirs = papers.PTB[:2], "2 x 1500 LSTM, one seed"
        else:
            continue
        (dense, dgc), model = theirs
        difference = c.difference("dgc")
        mine = [_number(c.mean(each, difference.seeds), ".2f") for each in plan.PAIR]
        ours = [*mine, len(difference.seeds), _interval(difference)]
        counted = f"{papers.ratio(_shapes(c)):,.0f}"
        lines.append([_title(c), dense, dgc, model, *ours, counted])
    if not lines:
        return ""
    headings = ["", "dense there", "DGC there", "what", "dense here", "DGC here"]
    headings += ["pairs", "difference here", "ratio as they count"]
    note = "The paper counts 6 bytes per entry sent, one-dimensional tensors whole, "
    note += "after warm-up. Ratios above that are not `at the end` are of a whole run."
    return f"## Beside Lin et al. (2018)\n\n{table(headings, lines)}\n\n{note}"


def _shapes(found):
    from study import registry
    from study.specs import Spec

    return registry.shapes(Spec.of(found.rows[0]))


def _failures(rows):
    failed = [
        f"- `{row['command']}`: {row.get('error', 'no value')}"
        for row in rows
        if not has_value(row)
    ]
    return "## Failures\n\n" + ("\n".join(failed) or "None.")


def _superseded(rows):
    """Return what was run again by the recipe, or nothing."""
    lines = [f"- `{row['command']}`: {row['metric']} {row['value']}" for row in rows]
    title = "## Not counted: clipped more tightly than the recipe says\n\n"
    return title + "\n".join(lines) if rows else ""


def _interval(difference):
    if not difference.seeds:
        return ""
    if math.isinf(difference.half_width):
        return f"{difference.mean:+.2f}"
    return f"{difference.mean:+.2f} ± {difference.half_width:.2f}"


def _ratio(dense, sent):
    return f"{dense / sent:,.1f}" if dense and sent else ""


def _number(value, spec):
    return "" if value is None else format(value, spec)
