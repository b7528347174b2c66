"""The tables of the report: methods against dense, in pairs, and against the papers."""

import itertools
import math

from registered import papers, plan
from registered.plan_page import markdown as table


def title(comparison):
    """Return the title of a comparison: task, model, workers."""
    model = (
        " with {blocks} blocks, stride {stride}".format(**comparison.model)
        if comparison.model
        else ""
    )
    return f"{comparison.task}{model}, {comparison.workers} workers"


def answers(comparisons):
    """Return a line per task: dense and `dgc`, and the verdict."""
    lines = []
    for comparison in comparisons:
        difference = comparison.difference("dgc")
        if not difference.seeds and not difference.failed:
            continue
        dense_bytes, dgc_bytes = (comparison.bytes_sent(each) for each in plan.PAIR)
        lines.append(
            [
                title(comparison),
                _metric(comparison),
                *_dense_and_dgc(comparison),
                comparison.verdict("dgc"),
                _ratio(dense_bytes, dgc_bytes),
            ]
        )
    headings = ["", "", "dense", "dgc", "pairs", "difference", "unit", "margin"]
    return table([*headings, "ratio of bytes"], lines)


def methods(comparison):
    """Return a line per method of a comparison."""
    lines = [
        [
            _label_with_note(comparison, label),
            *_accuracy(comparison, label),
            *_bytes(comparison, label),
        ]
        for label in comparison.labels
    ]
    headings = ["method", "runs", "failed", _metric(comparison)]
    headings += ["pairs", "dense, same seeds"]
    headings += [f"vs. dense, {comparison.unit.of_difference}"]
    headings += ["margin", "MB handed to collectives", "ratio"]
    headings += ["ratio at the end", "ring ratio", "ring ratio at the end"]
    return table(headings, lines)


def pairs(comparison):
    """Return the table of paired differences to methods other than dense, or "".

    Compares each addition of DGC with the stage before it, `dgc` with dense training
    that is clipped alike, and other methods with `dgc`.
    """
    ablation = [label for label in plan.ABLATION if comparison.rows_of(label)]
    compared = [(label, before) for before, label in itertools.pairwise(ablation)]
    compared += [(label, plan.TIGHTER) for label in ("dgc", *plan.FOR_LENGTHS)]
    compared += [(label, "dgc") for label in (*plan.FOR_LENGTHS, *plan.OTHER_METHODS)]
    lines = []
    for label, other in compared:
        difference = comparison.difference(label, other)
        if not difference.seeds and not difference.failed:
            continue
        verdict = "yes" if difference.separates else "no"
        if len(difference.seeds) < 2:
            verdict = "no interval yet"
        if difference.failed:
            verdict = f"failed in {len(difference.failed)}"
        interval = _interval(comparison, difference)
        lines.append([label, other, len(difference.seeds), interval, verdict])
    heading = f"difference, {comparison.unit.of_difference}"
    headings = ["method", "compared with", "pairs", heading, "separate"]
    return table(headings, lines) if lines else ""


def against_papers(comparisons):
    """Return the table of the papers' figures next to ours, or ""."""
    lines = []
    for comparison in comparisons:
        if comparison.task == "cifar10" and comparison.workers in papers.CIFAR10:
            dense, dgc = papers.CIFAR10[comparison.workers]
            model = "ResNet-110, 164 epochs, one seed"
        elif comparison.task == "ptb" and comparison.workers == 4:
            dense, dgc = papers.PTB[:2]
            model = "2 x 1500 LSTM, one seed"
        else:
            continue
        ratio = f"{papers.ratio(_shapes(comparison)):,.0f}"
        paper_cells = [title(comparison), dense, dgc, model]
        lines.append([*paper_cells, *_dense_and_dgc(comparison), ratio])
    headings = ["", "dense, paper", "DGC, paper", "paper's model", "dense", "dgc"]
    headings += ["pairs", "difference", "unit", "ratio as in the paper"]
    return table(headings, lines) if lines else ""


def _dense_and_dgc(comparison):
    """Return both means of the pairs, their number, the difference and its unit."""
    difference = comparison.difference("dgc")
    return [
        *(_mean(comparison, each, difference.seeds) for each in plan.PAIR),
        len(difference.seeds),
        _interval(comparison, difference),
        comparison.unit.of_difference,
    ]


def _metric(comparison):
    return f"{comparison.metric} {comparison.unit.of_value}".strip()


def _shapes(comparison):
    from registered import registry
    from registered.specs import Spec

    return registry.shapes(Spec.of(comparison.rows[0]))


def _label_with_note(comparison, label):
    """Return a label, and the seeds evaluated before it was added to the plan."""
    seen = plan.SEEDS_SEEN.get(label, {}).get(comparison.task, ())
    if not seen:
        return label
    text = f"{label} (defined after {_seeds(seen)} had been evaluated"
    excluded = plan.EXCLUDED_SEEDS.get(label, {}).get(comparison.task, ())
    if excluded:
        text += f"; pairs exclude {_seeds(excluded)}, which led to it"
    return text + ")"


def _seeds(seeds):
    """Return seeds in words: seed 1, seeds 0 and 1, seeds 0 to 4."""
    first, last = seeds[0], seeds[-1]
    if len(seeds) > 2 and len(seeds) == last - first + 1:
        return f"seeds {first} to {last}"
    return ("seeds " if len(seeds) > 1 else "seed ") + " and ".join(map(str, seeds))


def _accuracy(comparison, label):
    """Return the cells from the number of runs to the verdict.

    If there are pairs, both means are over the pairs, like the difference.
    """
    difference = comparison.difference(label)
    counts = [len(comparison.rows_of(label)), len(difference.failed)]
    if label == "dense":
        return [*counts, _mean(comparison, label), "", "", "", ""]
    seeds = difference.seeds
    return [
        *counts,
        _mean(comparison, label, seeds or None),
        len(seeds),
        _mean(comparison, "dense", seeds),
        _interval(comparison, difference),
        comparison.verdict(label),
    ]


def _bytes(comparison, label):
    """Return the cells of bytes and of ratios of dense to the method."""
    dense_total, total = (comparison.bytes_sent(each) for each in ("dense", label))
    dense_step, step = (
        comparison.bytes_per_step_at_end(each) for each in ("dense", label)
    )
    ring_bytes = comparison.ring_bytes
    return [
        f"{total / 1e6:,.2f}" if total else "",
        _ratio(dense_total, total),
        _ratio(dense_step, step),
        _ratio(ring_bytes("dense", dense_total), ring_bytes(label, total)),
        _ratio(ring_bytes("dense", dense_step, 1), ring_bytes(label, step, 1)),
    ]


def _mean(comparison, label, seeds=None):
    value = comparison.mean(label, seeds)
    return "" if value is None else f"{value:.{comparison.unit.digits}f}"


def _interval(comparison, difference):
    if not difference.seeds:
        return ""
    digits = comparison.unit.digits
    mean = f"{difference.mean:+.{digits}f}"
    if math.isinf(difference.half_width):
        return mean
    return f"{mean} ± {difference.half_width:.{digits}f}"


def _ratio(dense, sent):
    return f"{dense / sent:,.1f}" if dense and sent else ""
