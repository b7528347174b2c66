"""Checks of arguments that several classes take."""

import math
import numbers
import re
from typing import Any

LAST_PORT = 65535

_DEFAULT_REPR = re.compile(r"<[^<>]* at 0x[0-9a-f]+>")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def show(value: Any) -> str:
    """Return the `repr` for an error message, without addresses in memory.

    An object whose class has no `__repr__` is shown by its own or its class's name.
    """
    text = repr(value)
    if _DEFAULT_REPR.fullmatch(text):
        return getattr(value, "__name__", f"{type(value).__name__}(...)")
    return _ADDRESS.sub("", text)


def check_whole(
    what: str, value: Any, smallest: int = 1, unit: str = "", means: str = ""
) -> int:
    """Return an argument as an int; raise `ValueError` unless it is a whole number.

    Args:
        what: name of the argument.
        value: number that was passed; NumPy's too, and floats that are whole.
        smallest: least number that is allowed.
        unit: words for the message, of what is counted.
        means: words for the message, at its end, of what else there is.
    """
    if not is_whole(value) or value < smallest:
        raise ValueError(
            f"`{what}` must be a whole number{unit}, {smallest} or more{means}. "
            f"Received: {what}={show(value)}"
        )
    return int(value)


def check_steps(
    what: str, value: Any, smallest: int = 1, unit: str = " of training"
) -> int:
    """Return a number of steps; raise `ValueError` unless it is a whole number.

    Args:
        what: name of the argument.
        value: number that was passed, perhaps computed from a data set's cardinality.
        smallest: least number that is allowed.
        unit: words for the message, of what is counted.
    """
    return check_whole(what, value, smallest, unit, unknown_length(value))


def unknown_length(value: Any) -> str:
    """Return words for a message about a number of steps, if it is negative; or "".

    What `dataset.cardinality()` returns for an unknown or infinite length is.
    """
    if not is_whole(value) or value >= 0:
        return ""
    return (
        ". A negative number comes of a data set whose length is unknown: "
        "`int(dataset.cardinality())` is -2 for data from a generator and after "
        "`filter`, and -1 for endless data. Pass the number itself, `epochs * "
        "steps_per_epoch`, with the `steps_per_epoch` that `fit` is given; or tell the "
        "data set its length: `dataset.apply("
        "tf.data.experimental.assert_cardinality(length))`"
    )


def check_number(what: str, value: Any, interval: str, means: str = "") -> float:
    """Return an argument as a float; raise `ValueError` unless it is in an interval.

    Args:
        what: name of the argument.
        value: number that was passed; NumPy's too.
        interval: interval as it is written in mathematics, such as "(0, 1]"; one that
            ends with "inf)" is of finite numbers.
        means: words for the message, at its end, of what the number is.
    """
    low, high = map(float, interval[1:-1].split(","))
    within = _is_real(value) and (
        low < value < high
        or (interval[0] == "[" and value == low)
        or (interval[-1] == "]" and value == high)
    )
    if not within:
        wanted = f"number in {interval}"
        if math.isinf(high):
            first = f", {low:g} or more" if interval[0] == "[" else f" above {low:g}"
            wanted = f"finite number{first}"
        raise ValueError(
            f"`{what}` must be a {wanted}{means}. Received: {what}={show(value)}"
        )
    return float(value)


def is_whole(value: Any) -> bool:
    """Whether it is a whole number; NumPy's too, and floats that are whole."""
    return _is_real(value) and bool(value == value // 1)


def is_port(text: str) -> bool:
    """Whether it is the number of a port, from 1 to `LAST_PORT`."""
    return text.isdecimal() and 0 < int(text) <= LAST_PORT


def check_seed(seed: Any) -> int:
    """Return a seed as an int; raise `ValueError` unless it is a whole int64."""
    whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if not whole or not -(2**63) <= seed < 2**63:
        raise ValueError(
            "`seed` must be a whole number, from -2**63 to 2**63 - 1. "
            f"Received: seed={show(seed)}"
        )
    return int(seed)


def check_choice(what: str, value: Any) -> bool | None:
    """Return whether something is done, None for what is usual; else `ValueError`.

    Args:
        what: name of the argument.
        value: None, True or False; NumPy's too.
    """
    if value is None:
        return None
    if value in (0, 1):
        return bool(value)
    raise ValueError(
        f"`{what}` must be True, False, or None for the default. "
        f"Received: {what}={show(value)}"
    )


def check_decay(decay: Any) -> float:
    """Return a share of the residual to be kept; raise `ValueError` if it is none."""
    means = (
        ": the share of what was not sent that is added to what is to be sent next, 1 "
        "for all"
    )
    return check_number("decay", decay, "(0, 1]", means)


def check_sparsity(value: Any, what: str = "sparsity") -> float:
    """Return `value` as a float, or raise `ValueError` unless it is in [0, 1)."""
    means = ": the share of gradient entries that is not sent, for example 0.999"
    return check_number(what, value, "[0, 1)", means)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
