"""TensorFlow's C++ log: told apart from what a program prints to the same place."""

import re
from typing import NamedTuple

_HEAD = re.compile(
    r"""
    (?P<severity>[IWEF])\d{4}[ ]\d\d:\d\d:\d+\.\d+ [ ]+\d+[ ] \S+\.(?:cc|cpp|h|cu|inc):\d+\]
    | \d{4}-\d\d-\d\d[ ]\d\d:\d\d:\d\d\.\d+:[ ](?P<older>[IWEF])[ ]\S+\.(?:cc|h):\d+\]
    | WARNING:[ ]All[ ]log[ ]messages[ ]before[ ]absl::InitializeLog
    """,  # noqa: E501
    re.VERBOSE,
)
# Lines after the first one of a record. A traceback may hold the same, so that they
# count only where a record comes directly before.
_REST = re.compile(
    r"To enable the following instructions:|/job:\w+/|\t \[\[|:\{|:UNKNOWN:"
    r"|Additional GRPC error|RPC: /tensorflow\.|The error could be from a previous"
    r"|The (?:tasks have crashed|following tasks)"
)


class Piece(NamedTuple):
    """Text of the program, as it came, or a whole line of the log.

    `severity` is the log's: one of I, W, E and F; None for the program's.
    """

    text: str
    severity: str | None = None


class Separator:
    """Separates the lines of the log from a program's text, which comes in pieces.

    A line of the log may begin within a line of the program's, such as an unfinished
    progress bar.
    """

    def __init__(self) -> None:
        self._held = ""  # a line of the log that has not ended
        self._severity: str | None = None  # of the line directly before

    def feed(self, text: str) -> list[Piece]:
        """Return what can be told apart by now; the rest is held back."""
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        while text:
            text = self._take(text, pieces)
        return pieces

    def close(self) -> list[Piece]:
        """Return what was held back."""
        held, self._held = self._held, ""
        return [Piece(held, self._severity)] if held else []

    def _take(self, text: str, pieces: list[Piece]) -> str:
        """Add the first piece of a text; return what comes after it."""
        head = _HEAD.match(text)
        if head is None and not (self._severity and _REST.match(text)):
            self._severity = None
            later = _HEAD.search(text)
            stop = later.start() if later else len(text)
            pieces.append(Piece(text[:stop]))
            return text[stop:]
        if head is not None:
            self._severity = head["severity"] or head["older"] or "I"
        line, newline, rest = text.partition("\n")
        if newline:
            pieces.append(Piece(line, self._severity))
        else:
            self._held = line
        return rest
