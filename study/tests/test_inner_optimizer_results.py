"""What `study/inner.py` makes of its rows."""

import math

from experiments.inner import SEED_OF_RATES, refusals, summaries


def row(method, rate, seed, value, **more):
    return {
        "optimizer": "SGD",
        "method": method,
        "rate": rate,
        "seed": seed,
        "value": value,
        **more,
    }


def searched(method, values):
    return [row(method, rate, SEED_OF_RATES, v) for rate, v in values.items()]


DENSE = [
    *searched("dense", {1: 2.0, 2: 1.0, 4: 3.0}),
    row("dense", 2, 0, 1.0),
    row("dense", 2, 1, 1.5),
]


def test_differences_are_of_pairs_and_have_a_spread():
    """Seeds differ by 0.5, and differences to dense by 0.1."""
    rows = [row("dgc", 2, 0, 1.2), row("dgc", 2, 1, 1.8), row("dgc", 2, 2, 9.0)]
    (line,) = summaries([*DENSE, *rows], higher_is_better=False)
    assert line["dense"] == "1.2500 ± 0.3536"
    assert line["dgc"] == "+0.2500 ± 0.0707"
    (line,) = summaries([*DENSE, rows[0]], higher_is_better=False)
    assert line["dgc"] == "+0.2000"


def test_every_cell_says_whether_its_rate_is_at_the_edge():
    counted = [row("dgc", 6, 0, 1.2), row("top_k", 2, 0, 1.1)]
    search = searched("dgc", {0.6: 3.0, 2: 2.0, 6: 1.0})
    inside = searched("top_k", {0.6: 3.0, 2: 2.0, 6: 4.0})
    rows = [*DENSE, *search, *inside, *counted]
    (line,) = summaries(rows, higher_is_better=False)
    assert line["dgc"] == "+0.2000 (rate x 3, at the edge)"
    assert line["top_k"] == "+0.1000"
    first = [*searched("dense", {1: 2.0, 2: 3.0}), row("dense", 1, 0, 2.0)]
    (line,) = summaries(first, higher_is_better=False)
    assert line["dense"] == "2.0000 (at the edge)"


def test_the_rate_that_was_searched_is_taken():
    """Not the better one by seeds that count, nor one of more of them."""
    search = searched("dgc", {1: 5.0, 2: 6.0, 4: math.nan})
    counted = [row("dgc", rate, seed, rate) for rate, seed in ((2, 0), (2, 1), (1, 0))]
    for rows in (counted, counted[::-1]):
        (line,) = summaries([*DENSE, *search, *rows], higher_is_better=True)
        assert line["dgc"] == "+0.7500 ± 0.3536"
        (line,) = summaries([*DENSE, *search, *rows], higher_is_better=False)
        assert line["dgc"] == "+0.0000 (rate x 0.5, at the edge)"
    (line,) = summaries([*DENSE, *counted], higher_is_better=False)
    assert line["dgc"] == "+0.7500 ± 0.3536"


def test_refusals():
    rows = [row("dgc", 2, seed, None, refused="It is none.") for seed in (0, 1)]
    (line,) = summaries([*DENSE, *rows], higher_is_better=False)
    assert line["dgc"] == "refused"
    assert refusals([line]) == ["SGD is refused by dgc: It is none."]
