"""Checks of arguments that several methods take."""

import numbers
from typing import Any


def check_whole(what: str, value: Any, smallest: int = 1) -> int:
    """Return an argument that must be a whole number; raise `ValueError` if not."""
    whole = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not whole or value != value // 1 or value < smallest:
        raise ValueError(
            f"`{what}` must be a whole number, {smallest} or more. "
            f"Received: {what}={value!r}"
        )
    return int(value)
