"""Compares the choice of `collective="auto"` with the fastest measured algorithm."""

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
    """Return a row per case with the choice of `collective="auto"` and the fastest.

    The choice is the measured candidate that the cost model predicts to be the fastest.
    Predicted and measured times include the decoding of gathered buffers. For whole
    steps the choice is the step that `auto` took.
    """
    cases, steps = {}, {}
    for row in rows:
        workers, kind = row["workers"], row["kind"]
        if kind == "step":
            steps.setdefault((workers, row["asked"]), []).append(row)
        elif _algorithm(row) in _candidates(workers, kind):
            cases.setdefault((workers, kind, row["payload"]), []).append(row)
    choices = [_choose(measured) for measured in cases.values()]
    return choices + [_compare_steps(measured) for measured in steps.values()]


def _compare_steps(measured):
    """Compare the step of `auto` with the fastest step of its candidates."""
    (auto,) = [row for row in measured if row["exchange"] == "auto"]
    candidates = _candidates(auto["workers"], "entries")
    others = [
        row
        for row in measured
        if row["exchange"] == "float16"
        or (row["exchange"] not in {"auto", *METHODS} and _algorithm(row) in candidates)
    ]
    best = min(others, key=lambda row: row["median_ms"])
    return _compare(auto, auto["stated"], best)


def _algorithm(row):
    """Return the representation of a row's algorithm, which identifies it."""
    return repr(create_algorithm(row["exchange"], row["workers"]))


def _candidates(num_workers, kind):
    merges = kind == "entries"
    return [repr(a) for a in Auto().candidates(num_workers, merges=merges)]


def _choose(measured):
    candidates = _candidates(measured[0]["workers"], measured[0]["kind"])
    rows = {_algorithm(row): row for row in measured}
    ordered = [rows[algorithm] for algorithm in candidates if algorithm in rows]
    predicted = [row["model_ms"] + _decoding_ms(row) for row in ordered]
    choice = ordered[first_of_the_fastest(predicted)]
    best = min(measured, key=lambda row: row["median_ms"] + _decoding_ms(row))
    return _compare(choice, choice["exchange"], best)


def _compare(choice, name, best):
    choice_ms = choice["median_ms"] + _decoding_ms(choice)
    best_ms = best["median_ms"] + _decoding_ms(best)
    best_p90_ms = best["p90_ms"] + _decoding_ms(best)
    return {
        **{key: choice[key] for key in ("workers", "kind", "payload")},
        "chosen": name,
        "median_ms": choice_ms,
        "best": best["exchange"],
        "best_ms": best_ms,
        "ratio": choice_ms / best_ms,
        "within": "yes" if choice_ms <= max(1.15 * best_ms, best_p90_ms) else "no",
    }


def _decoding_ms(row):
    """Return the time that the cost model has for decoding gathered entries."""
    if row["kind"] != "entries":
        return 0.0
    algorithm = create_algorithm(row["exchange"], row["workers"])
    buffers = 1 if algorithm.drops_entries else row["workers"]
    return 1000 * buffers * row["payload"] * LinkSpeeds(*row["links"]).decoding
