"""Selects which rows of a product of parameters always run; the others are marked.

A trace takes a second or two, so a product of methods, dtypes and numbers of workers
takes minutes. Most faults depend on one value of one parameter, or on two together:
these rows always run, some more in `pytest -m slow`, and the rest of a product in
`pytest -m exhaustive`.
"""

import itertools

import pytest
from harness import Trainer

ONE_IN = 10  # share of the other rows that is `slow`; the rest is `exhaustive`


def rows(every, always):
    """Return parameters for all rows.

    Rows in `always` are not marked. One in ten of the others is `slow`, beginning with
    the first; the rest is `exhaustive`.
    """
    every, always = list(every), list(always)
    return _marked(every, always, [row for row in every if row not in always])


def in_turn(first, second, always=None):
    """Return the product of two columns.

    Every value of `first` (or of `always`) always runs with one value of `second`, in
    turn. One in ten of the pairs with the next value of `second` is `slow`; the other
    rows are `exhaustive`.
    """
    first, second = list(first), list(second)
    unmarked = first if always is None else always
    pairs = [(a, second[i % len(second)]) for i, a in enumerate(unmarked)]
    more = [(a, second[(i + 1) % len(second)]) for i, a in enumerate(first)]
    return _marked(list(itertools.product(first, second)), pairs, more)


def slow(*values, id=None):
    """Return a row that is `slow`."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def exhaustive(*values, id=None):
    """Return a row that is `exhaustive`."""
    return pytest.param(*values, id=id, marks=pytest.mark.exhaustive)


def _marked(every, always, more):
    slow = [row for row in more if row not in always][::ONE_IN]

    def mark(row):
        return None if row in always else "slow" if row in slow else "exhaustive"

    return [_row(row, mark(row)) for row in every]


def fewer(number):
    """Return a number of examples or steps: a quarter, or all with `--traced`."""
    return number if Trainer.always_traced else -(-number // 4)


def _row(row, mark):
    values = row if type(row) is tuple else (row,)
    marks = () if mark is None else getattr(pytest.mark, mark)
    names = [getattr(value, "__name__", str(value)) for value in values]
    return pytest.param(*values, marks=marks, id="-".join(names))
