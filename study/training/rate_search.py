"""Searches for a learning rate, and which rate a search chose."""

import math


def best_rate(rates, value_of, more=2):
    """Return the learning rate with the least value, and not one at the edge.

    Where the best one is the smallest or the largest, half of it or twice as much is
    tried too.

    Args:
        rates: the first to be tried.
        value_of: function of a rate; not finite, or None, if it does not train.
        more: how often to go further, at most.
    """
    found = {}

    def value(rate):
        if rate not in found:
            result = value_of(rate)
            finite = result is not None and math.isfinite(result)
            found[rate] = result if finite else math.inf
        return found[rate]

    best = min(sorted(rates), key=value)
    for _ in range(more):
        if len(found) == 1 or min(found) < best < max(found):
            break
        value(2 * best if best == max(found) else best / 2)
        best = min(sorted(found), key=found.get)
    return best


def chosen(values):
    """Return the rate that a search found, or None.

    Args:
        values: those of its runs by rate, of which less is better; not finite, or
            None, where it does not train.
    """
    finite = {r: v for r, v in values.items() if v is not None and math.isfinite(v)}
    return min(sorted(finite), key=finite.get, default=None)


def edge(rate, tried):
    """Return "yes" if a rate is the least or the largest of those tried, else None.

    Args:
        rate: the chosen one.
        tried: all rates it was chosen from; of one or none nothing is said.
    """
    at_edge = len(tried) > 1 and rate in (min(tried), max(tried))
    return "yes" if at_edge else None
