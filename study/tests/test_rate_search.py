"""A search for a learning rate, and what is said of its result."""

import math

import pytest
from training import rate_search


@pytest.mark.parametrize(
    ("optimum", "tried", "best"),
    [
        (2.0, [1, 2, 4], 2),
        (8.0, [1, 2, 4, 8, 16], 8),
        (100.0, [1, 2, 4, 8, 16], 16),
        (0.4, [0.25, 0.5, 1, 2, 4], 0.5),
    ],
)
def test_the_best_rate_is_not_at_the_edge(optimum, tried, best):
    calls = []

    def value(rate):
        calls.append(rate)
        return abs(math.log(rate / optimum))

    assert rate_search.best_rate([1, 2, 4], value) == best
    assert sorted(calls) == tried


def test_a_rate_that_does_not_train_is_not_the_best():
    assert rate_search.best_rate([1, 2, 4], lambda r: math.nan if r > 1 else -r) == 1
    assert rate_search.best_rate([1, 2], lambda r: r, more=0) == 1


def test_the_rate_that_a_search_found():
    """The smaller one of equal ones, and never one that does not train."""
    assert rate_search.chosen({4: 1.0, 2: 1.0, 1: math.nan, 8: None}) == 2
    assert rate_search.chosen({1: math.inf}) is rate_search.chosen({}) is None


def test_rates_at_the_edge_are_marked():
    found = {rate: rate_search.edge(rate, {1, 2, 4}) for rate in (1, 2, 4, 8)}
    assert found == {1: "yes", 2: None, 4: "yes", 8: None}
    assert rate_search.edge(1, {1}) is None
