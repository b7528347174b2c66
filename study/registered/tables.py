"""The tables of the report: methods beside dense, in pairs, and beside the papers."""

import itertools
import math

from registered import papers, plan
from registered.plan_page import markdown as table


def title(found):
    """Return what a comparison is of: task, model, workers."""
    model = (
        " with {blocks} blocks, stride {stride}".format(**found.model)
        if found.model
        else ""
    )
    return f"{found.task}{model}, {found.workers} workers"


def answers(comparisons):
    """Return a line for each task: dense and `dgc`, and what the margin says."""
    lines = []
    for found in comparisons:
        difference = found.difference("dgc")
        if not difference.seeds and not difference.failed:
            continue
        handed = _ratio(*(found.sent(each) for each in plan.PAIR))
        said = *_dense_and_dgc(found), found.verdict("dgc"), handed
        lines.append([title(found), _metric(found), *said])
    headings = ["", "", "dense", "dgc", "pairs", "difference", "in", "margin"]
    return table([*headings, "ratio of bytes handed"], lines)


def methods(found):
    """Return a line for each method of a comparison."""
    lines = [
        [_named(found, label), *_accuracy(found, label), *_bytes(found, label)]
        for label in found.labels
    ]
    headings = ["method", "runs", "failed", _metric(found)]
    headings += ["pairs", "dense of these", f"to dense, {found.unit.of_difference}"]
    headings += ["margin", "MB handed to collectives", "ratio of these"]
    headings += ["at the end", "ratio on a ring", "at its end"]
    return table(headings, lines)


def pairs(found):
    """Return methods beside others than dense, or nothing.

    What each addition of DGC brings after the one before, `dgc` beside dense training
    that is clipped as it is, and other methods beside `dgc`.
    """
    ablation = [label for label in plan.ABLATION if found.of(label)]
    asked = [(label, before) for before, label in itertools.pairwise(ablation)]
    asked += [(label, plan.TIGHTER) for label in ("dgc", *plan.FOR_LENGTHS)]
    asked += [(label, "dgc") for label in (*plan.FOR_LENGTHS, *plan.OTHERS)]
    lines = []
    for label, other in asked:
        step = found.difference(label, other)
        if not step.seeds and not step.failed:
            continue
        verdict = "yes" if step.separates else "no"
        if len(step.seeds) < 2:
            verdict = "no interval yet"
        if step.failed:
            verdict = f"failed in {len(step.failed)}"
        lines.append([label, other, len(step.seeds), _interval(found, step), verdict])
    difference = f"difference, {found.unit.of_difference}"
    headings = ["method", "beside", "pairs", difference, "separate"]
    return table(headings, lines) if lines else ""


def beside_papers(comparisons):
    """Return the papers' figures beside ours, or nothing."""
    lines = []
    for found in comparisons:
        if found.task == "cifar10" and found.workers in papers.CIFAR10:
            theirs = papers.CIFAR10[found.workers], "ResNet-110, 164 epochs, one seed"
        elif found.task == "ptb" and found.workers == 4:
            theirs = papers.PTB[:2], "2 x 1500 LSTM, one seed"
        else:
            continue
        (dense, dgc), model = theirs
        ours = *_dense_and_dgc(found), f"{papers.ratio(_shapes(found)):,.0f}"
        lines.append([title(found), dense, dgc, model, *ours])
    headings = ["", "dense there", "DGC there", "what", "dense here", "DGC here"]
    headings += ["pairs", "difference here", "in", "ratio as they count"]
    return table(headings, lines) if lines else ""


def _dense_and_dgc(found):
    """Return both means of the pairs, their number, the difference and its unit."""
    difference = found.difference("dgc")
    means = [_mean(found, each, difference.seeds) for each in plan.PAIR]
    counted = len(difference.seeds), _interval(found, difference)
    return [*means, *counted, found.unit.of_difference]


def _metric(found):
    return f"{found.metric} {found.unit.of_value}".strip()


def _shapes(found):
    from registered import registry
    from registered.specs import Spec

    return registry.shapes(Spec.of(found.rows[0]))


def _named(found, label):
    """Return a label, and what had been seen when it was added to the plan."""
    seen = plan.SEEN.get(label, {}).get(found.task, ())
    if not seen:
        return label
    text = f"{label} (as it is since {_seeds(seen)} had been seen"
    led = plan.LED_TO.get(label, {}).get(found.task, ())
    if led:
        text += f"; not of the pairs: {_seeds(led)}, which led to it"
    return text + ")"


def _seeds(seeds):
    """Return seeds in words: seed 1, seeds 0 and 1, seeds 0 to 4."""
    first, last = seeds[0], seeds[-1]
    if len(seeds) > 2 and len(seeds) == last - first + 1:
        return f"seeds {first} to {last}"
    return ("seeds " if len(seeds) > 1 else "seed ") + " and ".join(map(str, seeds))


def _accuracy(found, label):
    """Return runs, failures, the mean; and of the pairs dense's, and the difference.

    Both means are over the pairs, where there are any, as the difference is.
    """
    difference = found.difference(label)
    counts = len(found.of(label)), len(difference.failed)
    if label == "dense":
        return [*counts, _mean(found, label), "", "", "", ""]
    seeds = difference.seeds
    return [
        *counts,
        _mean(found, label, seeds or None),
        len(seeds),
        _mean(found, "dense", seeds),
        _interval(found, difference),
        found.verdict(label),
    ]


def _bytes(found, label):
    sent = found.sent(label)
    both = "dense", label
    whole = [found.sent(each) for each in both]
    late = [found.sent_at_end(each) for each in both]
    handed = list(zip(both, whole, late, strict=True))
    return [
        f"{sent / 1e6:,.2f}" if sent else "",
        _ratio(*whole),
        _ratio(*late),
        _ratio(*(found.on_a_ring(each, all_steps) for each, all_steps, _ in handed)),
        _ratio(*(found.on_a_ring(each, one, 1) for each, _, one in handed)),
    ]


def _mean(found, label, seeds=None):
    value = found.mean(label, seeds)
    return "" if value is None else f"{value:.{found.unit.digits}f}"


def _interval(found, difference):
    if not difference.seeds:
        return ""
    digits = found.unit.digits
    mean = f"{difference.mean:+.{digits}f}"
    if math.isinf(difference.half_width):
        return mean
    return f"{mean} ± {difference.half_width:.{digits}f}"


def _ratio(dense, sent):
    return f"{dense / sent:,.1f}" if dense and sent else ""
