"""Units: rates and times as people write them, "1gbit" and "0.2ms"."""

import math
import numbers
import re
from typing import Any

from tf_dgc.arguments import show

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def bits_per_second(rate: float | str) -> float:
    """Return a rate in bits per second.

    Args:
        rate: number of bits per second, or text as `tc` has it: "1gbit", "100 Mbit/s".

    Raises:
        ValueError: for anything else, and for what is not above 0.
    """
    found = _number(rate, {**_RATES, **{f"{u}/s": f for u, f in _RATES.items()}})
    if not 0 < found < math.inf:
        raise ValueError(
            "`bandwidth` must be above 0: bits per second, or a text with a unit of "
            f'{", ".join(_RATES)}, as "1gbit". Received: bandwidth={show(rate)}'
        )
    return found


def seconds(time: float | str) -> float:
    """Return a time in seconds.

    Args:
        time: number of seconds, or a text with a unit: "0.2ms".

    Raises:
        ValueError: for anything else, and for what is below 0.
    """
    found = _number(time, _TIMES)
    if not 0 <= found < math.inf:
        raise ValueError(
            "`latency` must be 0 or more: seconds, or a text with a unit of "
            f'{", ".join(_TIMES)}, as "0.2ms". Received: latency={show(time)}'
        )
    return found


def budget(time: float | str) -> float:
    """Return seconds to spend on something.

    Args:
        time: number of seconds, or a text with a unit.

    Raises:
        ValueError: for anything else, and for what is not above 0.
    """
    found = _number(time, _TIMES)
    if not 0 < found < math.inf:
        raise ValueError(
            "`seconds` must be above 0: time to spend on timed steps. "
            f"Received: seconds={show(time)}"
        )
    return found


def _number(value: Any, units: dict[str, float]) -> float:
    """Return a value in the unit whose factor is 1; NaN if it is none."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str):
        return math.nan
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*", value.lower())
    try:
        number, unit = float(match[1]), match[2]  # type: ignore[index]
        return number * (units[unit] if unit else 1.0)
    except (TypeError, ValueError, KeyError):
        return math.nan


def rate_text(bits: float) -> str:
    """Return a rate as people write it, with two digits."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        number = bits / factor
        if number >= 99.5:
            return f"{number:,.0f} {unit}"
        if number >= 0.9995:  # or it would be rounded to 1,000 of the next one
            return f"{number:.2g} {unit}"
    return f"{bits:.0f} bit/s"
