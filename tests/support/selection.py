"""Which rows of a product of parameters run always, and which are `slow`.

A trace takes a second or two, so a product of methods, dtypes and numbers of workers
takes minutes. Most faults need one value of one parameter, or two together: those run
always, and the whole product in `pytest -m slow`.
"""

import itertools

import pytest
from harness import Trainer


def rows(every, always):
    """Return parameters for all rows; those that are not in `always` are `slow`."""
    always = list(always)
    return [_row(row, row in always) for row in every]


def in_turn(first, second, always=None):
    """Return the product of two columns.

    Every value of `first`, or of `always` if given, runs always with one of `second`,
    in turn; the other rows are `slow`.
    """
    first, second = list(first), list(second)
    chosen = first if always is None else always
    pairs = [(a, second[i % len(second)]) for i, a in enumerate(chosen)]
    return rows(itertools.product(first, second), pairs)


def fewer(number):
    """Return how many examples or steps to take: a quarter, but in `--traced` all."""
    return number if Trainer.always_traced else -(-number // 4)


def _row(row, is_always):
    values = row if type(row) is tuple else (row,)
    marks = () if is_always else pytest.mark.slow
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))
