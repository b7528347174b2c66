"""Checks of arguments that several classes take."""

import math
import numbers
import re
from typing import Any

LAST_PORT = 65535

_DEFAULT_REPR = re.compile(r"<[^<>]* at 0x[0-9a-f]+>")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def show(value: Any) -> str:
    """Return the `repr` for an error message, without memory addresses.

    An object with the default `repr` is shown by its name or its class's name.
    """
    text = repr(value)
    if _DEFAULT_REPR.fullmatch(text):
        return getattr(value, "__name__", f"{type(value).__name__}(...)")
    return _ADDRESS.sub("", text)


def check_whole(
    name: str, value: Any, minimum: int = 1, unit: str = "", suffix: str = ""
) -> int:
    """Return an argument as an int; raise `ValueError` unless it is a whole number.

    NumPy numbers and floats without a fraction are allowed.

    Args:
        name: name of the argument.
        value: value of the argument.
        minimum: smallest allowed number.
        unit: text after "whole number" in the message, such as " of steps".
        suffix: text at the end of the message's first sentence.
    """
    if not is_whole(value) or value < minimum:
        raise ValueError(
            f"`{name}` must be a whole number{unit}, {minimum} or more{suffix}. "
            f"Received: {name}={show(value)}"
        )
    return int(value)


def check_steps(
    name: str, value: Any, minimum: int = 1, unit: str = " of training steps"
) -> int:
    """Do the same as `check_whole`; the message explains negative cardinalities."""
    return check_whole(name, value, minimum, unit, unknown_length(value))


def unknown_length(value: Any) -> str:
    """Return an explanation of a negative number of steps for an error message, or "".

    `dataset.cardinality()` is negative for an unknown or infinite length.
    """
    if not is_whole(value) or value >= 0:
        return ""
    return (
        ". A data set of unknown length gives a negative number: "
        "`int(dataset.cardinality())` is -2 for data from a generator and after "
        "`filter`, and -1 for endless data. Pass the number itself, `epochs * "
        "steps_per_epoch`, with the `steps_per_epoch` that you pass to `fit`; or set "
        "the data set's length: `dataset.apply("
        "tf.data.experimental.assert_cardinality(length))`"
    )


def check_number(name: str, value: Any, interval: str, suffix: str = "") -> float:
    """Return an argument as a float; raise `ValueError` unless it is in an interval.

    Args:
        name: name of the argument.
        value: value of the argument; NumPy numbers are allowed.
        interval: interval in mathematical notation, such as "(0, 1]" or "[1, inf)".
        suffix: text at the end of the message's first sentence, such as a meaning.
    """
    low, high = map(float, interval[1:-1].split(","))
    within = _is_real(value) and (
        low < value < high
        or (interval[0] == "[" and value == low)
        or (interval[-1] == "]" and value == high)
    )
    if not within:
        allowed = f"number in {interval}"
        if math.isinf(high):
            bound = f", {low:g} or more" if interval[0] == "[" else f" above {low:g}"
            allowed = f"finite number{bound}"
        raise ValueError(
            f"`{name}` must be a {allowed}{suffix}. Received: {name}={show(value)}"
        )
    return float(value)


def check_decay(decay: Any) -> float:
    """Return a decay as a float; raise `ValueError` unless it is in (0, 1]."""
    meaning = ": the share of the residual that is kept in each step, 1 for all of it"
    return check_number("decay", decay, "(0, 1]", meaning)


def check_sparsity(value: Any, name: str = "sparsity") -> float:
    """Return a sparsity as a float; raise `ValueError` unless it is in [0, 1)."""
    meaning = ": the share of gradient entries that is not sent, for example 0.999"
    return check_number(name, value, "[0, 1)", meaning)


def check_seed(seed: Any) -> int:
    """Return a seed as an int; raise `ValueError` unless it is a whole int64."""
    whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if not whole or not -(2**63) <= seed < 2**63:
        raise ValueError(
            "`seed` must be a whole number, from -2**63 to 2**63 - 1. "
            f"Received: seed={show(seed)}"
        )
    return int(seed)


def check_choice(name: str, value: Any) -> bool | None:
    """Return True, False or None (default); raise `ValueError` for anything else."""
    if value is None:
        return None
    if value in (0, 1):
        return bool(value)
    raise ValueError(
        f"`{name}` must be True, False, or None for the default. "
        f"Received: {name}={show(value)}"
    )


def check_bool(name: str, value: Any) -> bool:
    """Return True or False; raise `ValueError` for anything else."""
    choice = check_choice(name, value) if value in (0, 1) else None
    if choice is None:
        raise ValueError(
            f"`{name}` must be True or False. Received: {name}={show(value)}"
        )
    return choice


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, NumPy's and 2.0 included."""
    return _is_real(value) and bool(value == value // 1)


def is_port(text: str) -> bool:
    """Whether a text is a port number, from 1 to `LAST_PORT`."""
    return text.isdecimal() and 0 < int(text) <= LAST_PORT


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
