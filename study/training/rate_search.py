"""Searches for a learning rate."""

import math


def best_rate(rates, value_of, more=2):
    """Return the learning rate with the smallest value.

    If the best rate is the smallest or the largest one, half or twice that rate is
    tried as well.

    Args:
        rates: rates to try first.
        value_of: function of a rate that returns its value; not finite or None if
            training diverges.
        more: maximum number of further rates.
    """
    values = {}

    def value(rate):
        if rate not in values:
            result = value_of(rate)
            finite = result is not None and math.isfinite(result)
            values[rate] = result if finite else math.inf
        return values[rate]

    best = min(sorted(rates), key=value)
    for _ in range(more):
        if len(values) == 1 or min(values) < best < max(values):
            break
        value(2 * best if best == max(values) else best / 2)
        best = min(sorted(values), key=values.get)
    return best


def rate_with_least_value(values):
    """Return the rate with the smallest finite value, or None.

    Args:
        values: values by rate; not finite or None if training diverged.
    """
    finite = {r: v for r, v in values.items() if v is not None and math.isfinite(v)}
    return min(sorted(finite), key=finite.get, default=None)


def edge(rate, rates):
    """Return "yes" if a rate is the smallest or the largest of several, else None.

    Args:
        rate: the selected rate.
        rates: all rates of the search.
    """
    at_edge = len(rates) > 1 and rate in (min(rates), max(rates))
    return "yes" if at_edge else None
