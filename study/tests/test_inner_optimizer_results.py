"""The tables of `study/inner_optimizers.py`."""

import math

from experiments.inner_optimizers import SEED_OF_RATES, refusals, summaries


def row(method, rate, seed, value, **more):
    return {
        "optimizer": "SGD",
        "method": method,
        "rate": rate,
        "seed": seed,
        "value": value,
        **more,
    }


def search_rows(method, values):
    return [row(method, rate, SEED_OF_RATES, v) for rate, v in values.items()]


DENSE = [
    *search_rows("dense", {1: 2.0, 2: 1.0, 4: 3.0}),
    row("dense", 2, 0, 1.0),
    row("dense", 2, 1, 1.5),
]


def test_differences_are_paired_and_have_a_deviation():
    """Seeds differ by 0.5, but differences to dense by 0.1 only."""
    rows = [row("dgc", 2, 0, 1.2), row("dgc", 2, 1, 1.8), row("dgc", 2, 2, 9.0)]
    (line,) = summaries([*DENSE, *rows], higher_is_better=False)
    assert line["dense"] == "1.2500 ± 0.3536"
    assert line["dgc"] == "+0.2500 ± 0.0707"
    (line,) = summaries([*DENSE, rows[0]], higher_is_better=False)
    assert line["dgc"] == "+0.2000"


def test_cells_mark_rates_at_the_edge():
    runs = [row("dgc", 6, 0, 1.2), row("top_k", 2, 0, 1.1)]
    at_edge = search_rows("dgc", {0.6: 3.0, 2: 2.0, 6: 1.0})
    inside = search_rows("top_k", {0.6: 3.0, 2: 2.0, 6: 4.0})
    rows = [*DENSE, *at_edge, *inside, *runs]
    (line,) = summaries(rows, higher_is_better=False)
    assert line["dgc"] == "+0.2000 (rate x 3, edge of search)"
    assert line["top_k"] == "+0.1000"
    dense = [*search_rows("dense", {1: 2.0, 2: 3.0}), row("dense", 1, 0, 2.0)]
    (line,) = summaries(dense, higher_is_better=False)
    assert line["dense"] == "2.0000 (edge of search)"


def test_best_rate_of_the_search_is_used():
    """Even if another rate is better with other seeds, or has more seeds."""
    search = search_rows("dgc", {1: 5.0, 2: 6.0, 4: math.nan})
    runs = [row("dgc", rate, seed, rate) for rate, seed in ((2, 0), (2, 1), (1, 0))]
    for rows in (runs, runs[::-1]):
        (line,) = summaries([*DENSE, *search, *rows], higher_is_better=True)
        assert line["dgc"] == "+0.7500 ± 0.3536"
        (line,) = summaries([*DENSE, *search, *rows], higher_is_better=False)
        assert line["dgc"] == "+0.0000 (rate x 0.5, edge of search)"
    (line,) = summaries([*DENSE, *runs], higher_is_better=False)
    assert line["dgc"] == "+0.7500 ± 0.3536"


def test_rejected_optimizers_are_noted():
    rows = [row("dgc", 2, seed, None, refused="It is none.") for seed in (0, 1)]
    (line,) = summaries([*DENSE, *rows], higher_is_better=False)
    assert line["dgc"] == "refused"
    assert refusals([line]) == ["SGD is refused by dgc: It is none."]
