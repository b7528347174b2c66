"""The search for a learning rate."""

import math

import pytest
from training import rate_search


@pytest.mark.parametrize(
    ("optimum", "rates", "best"),
    [
        (2.0, [1, 2, 4], 2),
        (8.0, [1, 2, 4, 8, 16], 8),
        (100.0, [1, 2, 4, 8, 16], 16),
        (0.4, [0.25, 0.5, 1, 2, 4], 0.5),
    ],
)
def test_search_continues_beyond_the_edge(optimum, rates, best):
    calls = []

    def value(rate):
        calls.append(rate)
        return abs(math.log(rate / optimum))

    assert rate_search.best_rate([1, 2, 4], value) == best
    assert sorted(calls) == rates


def test_diverging_rate_is_never_best():
    assert rate_search.best_rate([1, 2, 4], lambda r: math.nan if r > 1 else -r) == 1
    assert rate_search.best_rate([1, 2], lambda r: r, more=0) == 1


def test_smallest_of_equally_good_rates_is_selected():
    best = rate_search.rate_with_least_value
    assert best({4: 1.0, 2: 1.0, 1: math.nan, 8: None}) == 2
    assert best({1: math.inf}) is best({}) is None


def test_rates_at_the_edge_are_marked():
    edges = {rate: rate_search.edge(rate, {1, 2, 4}) for rate in (1, 2, 4, 8)}
    assert edges == {1: "yes", 2: None, 4: "yes", 8: None}
    assert rate_search.edge(1, {1}) is None
