"""What `collective="auto"` would choose among exchanges that were measured."""

from common.algorithms import METHODS, create_algorithm
from tf_dgc.collectives import Auto, LinkSpeeds
from tf_dgc.collectives.cost_model import first_of_the_fastest

COLUMNS = [
    ("workers", "workers", "d"),
    ("kind", "kind", ""),
    ("payload", "bytes", ",d"),
    ("chosen", "chosen", ""),
    ("median_ms", "median (ms)", ",.1f"),
    ("best", "fastest", ""),
    ("best_ms", "its median (ms)", ",.1f"),
    ("ratio", "ratio", ".2f"),
    ("within", "within 15 % or its p90", ""),
]


def compare_choices(rows):
    """Return what `collective="auto"` would choose in each case, beside the fastest.

    Of its candidates that were measured, the one by which the model goes; a
    gather that is not merged is behind by what the decoding of its buffers takes, on
    both sides of the comparison. Of whole steps it is what `auto` took itself.
    """
    cases, steps = {}, {}
    for row in rows:
        if row["kind"] == "step":
            steps.setdefault((row["workers"], row["asked"]), []).append(row)
            continue
        case = row["workers"], row["kind"], row["payload"]
        if repr(create_algorithm(row["exchange"], row["workers"])) in _candidates(
            *case[:2]
        ):
            cases.setdefault(case, []).append(row)
    found = [_choice(measured) for measured in cases.values()]
    return found + [_choice_of_steps(measured) for measured in steps.values()]


def _choice_of_steps(measured):
    """Return what `auto` took for its steps, beside the fastest of its candidates."""
    (auto,) = [row for row in measured if row["exchange"] == "auto"]
    number = auto["workers"]
    known = _candidates(number, "entries")
    others = [row for row in measured if row["exchange"] == "float16"]
    for row in measured:
        if row["exchange"] not in {"auto", *METHODS}:
            others += (
                [row]
                if repr(create_algorithm(row["exchange"], number)) in known
                else []
            )
    best = min(others, key=lambda row: row["median_ms"])
    return _comparison(auto, auto["stated"], best)


def _candidates(number, kind):
    return [repr(e) for e in Auto().candidates(number, merges=kind == "entries")]


def _choice(measured):
    candidates = _candidates(measured[0]["workers"], measured[0]["kind"])
    known = {
        repr(create_algorithm(row["exchange"], row["workers"])): row for row in measured
    }
    ordered = [known[way] for way in candidates if way in known]
    predicted = [row["model_ms"] + _decoding_ms(row) for row in ordered]
    chosen = ordered[first_of_the_fastest(predicted)]
    best = min(measured, key=lambda row: row["median_ms"] + _decoding_ms(row))
    return _comparison(chosen, chosen["exchange"], best)


def _comparison(chosen, name, best):
    mine, least = (row["median_ms"] + _decoding_ms(row) for row in (chosen, best))
    spread = best["p90_ms"] + _decoding_ms(best)
    return {
        **{key: chosen[key] for key in ("workers", "kind", "payload")},
        "chosen": name,
        "median_ms": mine,
        "best": best["exchange"],
        "best_ms": least,
        "ratio": mine / least,
        "within": "yes" if mine <= max(1.15 * least, spread) else "no",
    }


def _decoding_ms(row):
    """Return what decoding takes behind a gather of entries, as the model has it."""
    if row["kind"] != "entries":
        return 0.0
    buffers = (
        1
        if create_algorithm(row["exchange"], row["workers"]).drops_entries
        else row["workers"]
    )
    return 1000 * buffers * row["payload"] * LinkSpeeds(*row["links"]).decoding
