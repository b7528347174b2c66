"""Checks of arguments that several classes take."""

import numbers
from typing import Any


def check_whole(what: str, value: Any, smallest: int = 1, unit: str = "") -> int:
    """Return an argument as an int; raise `ValueError` unless it is a whole number.

    Args:
        what: name of the argument.
        value: number that was passed; NumPy's too, and floats that are whole.
        smallest: least number that is allowed.
        unit: words for the message, of what is counted.
    """
    if not is_whole(value) or value < smallest:
        raise ValueError(
            f"`{what}` must be a whole number{unit}, {smallest} or more. "
            f"Received: {what}={value!r}"
        )
    return int(value)


def is_whole(value: Any) -> bool:
    """Whether it is a whole number; NumPy's too, and floats that are whole."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and bool(value == value // 1)


def check_seed(seed: Any) -> int:
    """Return a seed as an int; raise `ValueError` unless it is a whole int64."""
    whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if not whole or not -(2**63) <= seed < 2**63:
        raise ValueError(
            "`seed` must be a whole number, from -2**63 to 2**63 - 1. "
            f"Received: seed={seed!r}"
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
        f"Received: {what}={value!r}"
    )


def check_decay(decay: Any) -> float:
    """Return a share of the residual to be kept; raise `ValueError` if it is none."""
    number = isinstance(decay, numbers.Real) and not isinstance(decay, bool)
    if not number or not 0 < decay <= 1:
        raise ValueError(
            "`decay` must be in (0, 1]: the share of what was not sent that is added "
            f"to what is to be sent next, 1 for all. Received: decay={decay!r}"
        )
    return float(decay)


def check_sparsity(value: Any, what: str = "sparsity") -> float:
    """Return `value` as a float, or raise `ValueError` unless it is in [0, 1)."""
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Real)
        or not 0 <= float(value) < 1
    ):
        raise ValueError(
            f"`{what}` must be a number in [0, 1): the share of gradient entries that "
            "is not sent, for example 0.999. "
            f"Received: {what}={value!r}"
        )
    return float(value)
