"""Kinds: what options may be, each a function of a text, as argparse takes it."""

import argparse
import math
import re

from tf_dgc import arguments

_HOST = re.compile(r"(?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9A-Fa-f:.]+\])")


def count(text: str, least: int = 1) -> int:
    """Return a whole number that is not below the least."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, {least} or more; received: {text}"
        )
    return int(text)


def count_or_0(text: str) -> int:
    """Return a whole number, 0 or more."""
    return count(text, least=0)


def port(text: str) -> int:
    """Return the number of a port."""
    if not arguments.is_port(text):
        raise argparse.ArgumentTypeError(
            f"must be a port, from 1 to {arguments.LAST_PORT}; received: {text}"
        )
    return int(text)


def counts(text: str) -> list[int]:
    """Return whole numbers that have commas between them."""
    return [count(part) for part in text.split(",")]


def above_0(text: str) -> float:
    """Return a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0; received: {text}")
    return number


def hosts(text: str) -> list[str]:
    """Return names of hosts that have commas between them."""
    names = text.split(",")
    if not all(_HOST.fullmatch(name) for name in names):
        raise argparse.ArgumentTypeError(
            "must be names of hosts with commas between them, such as a, me@a or "
            "[::1], twice for two workers, without ports or numbers of workers; "
            f"received: {text}"
        )
    return names
