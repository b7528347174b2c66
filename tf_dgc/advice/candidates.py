"""Candidates: the ways to train that are compared."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras

from tf_dgc import compressors
from tf_dgc._internals.optimizer_copies import copy_optimizer
from tf_dgc.arguments import show
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.optimizers.dgc import DGCOptimizer
from tf_dgc.schedules.periods import check_period

DENSE = "dense"
PERIOD = 16
"""Steps between two exchanges of local SGD, as a candidate."""
DEFAULT = (DENSE, "float16", "uniform_8bit", "power_sgd", "dgc", f"local_sgd {PERIOD}")
"""What is compared by itself, and of equally fast ones the first is advised."""


class Candidate(NamedTuple):
    """A way to train.

    Attributes:
        name: name of it, as `advise(methods=...)` takes it.
        make: function of an inner optimizer that returns the one whose step is timed.
        period: number of steps from one exchange to the next.
        code: text to write in a script, where the optimizer was.
    """

    name: str
    make: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]
    period: int = 1
    code: str = "optimizer"


def find(names: Sequence[str] | str) -> list[Candidate]:
    """Return candidates by name; the dense one is always among them, and first.

    Args:
        names: "dense", "dgc", "dgc SPARSITY", "local_sgd PERIOD", or methods as
            `tf-dgc methods` lists them; one alone, too.

    Raises:
        ValueError: for other names.
    """
    names = [names] if isinstance(names, str) else names
    wanted = [DENSE, *(name for name in names if name != DENSE)]
    return [_find(name) for name in dict.fromkeys(wanted)]


def copy_of(inner: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return another optimizer of the same settings; of a built one, of its config."""
    if inner.built:
        return type(inner).from_config(inner.get_config())
    return copy_optimizer(inner)


def check(wanted: Sequence[Candidate], inner: keras.optimizers.Optimizer) -> None:
    """Raise `ValueError` if one cannot be made, before any is timed.

    Args:
        wanted: ways to train.
        inner: optimizer that they are to be made of, which is copied.
    """
    for candidate in wanted:
        try:
            candidate.make(copy_of(inner))
        except ValueError as error:
            raise ValueError(f"{candidate.name!r} cannot be: {error}") from error


def _find(name: str) -> Candidate:
    kind, _, number = name.partition(" ")
    try:
        if name == DENSE:
            return Candidate(name, lambda inner: inner)
        if kind == "dgc":
            sparsity = float(number or 0.999)
            code = "tf_dgc.DGCOptimizer(optimizer" + (
                f", {sparsity})" if number else ")"
            )
            return Candidate(name, lambda i: DGCOptimizer(i, sparsity), code=code)
        if kind == "local_sgd":
            period = check_period(int(number or PERIOD))
            code = f"tf_dgc.local_sgd(optimizer, {period})"
            # A local step is the inner optimizer's own.
            return Candidate(name, lambda inner: inner, period, code)
        method = compressors.METHODS[name]
    except (KeyError, ValueError):
        raise ValueError(
            '`methods` must be of "dense", "dgc", "dgc 0.99", "local_sgd 16" and '
            f"{', '.join(sorted(compressors.METHODS))}. Received: {show(name)}"
        ) from None
    code = f'tf_dgc.CompressedOptimizer(optimizer, "{name}")'
    return Candidate(name, lambda i: CompressedOptimizer(i, method()), code=code)
