"""Where text of several sources goes: a terminal, a pipe or a file."""

import contextlib
import os
import re
import threading
from typing import TextIO

_COLOR = re.compile(r"\x1b\[[\d;]*m")
_OTHER_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-ln-z]|\x08")
_RANK_COLORS = (36, 33, 35, 32, 34, 31)  # ISO 6429: cyan, yellow, magenta, ...


class Display:
    """A text stream that takes what it can, and never fails.

    What its encoding lacks becomes a question mark. When nobody reads any more, or the
    disk is full, the rest is dropped: neither is a reason to end training.
    """

    def __init__(self, stream: TextIO):
        self.terminal = stream.isatty()
        self.colors = self.terminal and "NO_COLOR" not in os.environ
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        self._lock = threading.Lock()
        self._within_line = False

    def write(self, text: str) -> None:
        """Write text as it is."""
        with self._lock:
            self._write(text)

    def line(self, text: str) -> None:
        """Write a line of its own, without the control characters it does not take."""
        text = _OTHER_CONTROL.sub("", text)
        if not self.colors:
            text = _COLOR.sub("", text)
        with self._lock:
            self._write(f"\n{text}\n" if self._within_line else f"{text}\n")

    def ranked(self, rank: int | None, text: str) -> None:
        """Write a line behind a worker's rank; None for a server."""
        mark = "[server]" if rank is None else f"[{rank}]"
        if self.colors and rank is not None:
            color = _RANK_COLORS[rank % len(_RANK_COLORS)]
            mark = f"\x1b[{color}m{mark}\x1b[0m"
        self.line(f"{mark} {text}")

    def say(self, message: str) -> None:
        """Write a line of the launcher's own."""
        self.line(f"[tf-dgc] {message}")

    def close(self) -> None:
        """Close the stream; what is written afterwards is dropped."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def _write(self, text: str) -> None:
        self._within_line = not text.endswith("\n")
        text = text.encode(self._encoding, "replace").decode(self._encoding)
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # Else Python itself would fail when it ends.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def final_state(line: str) -> str:
    """Return what is left to see of a line that carriage returns wrote over."""
    return next((part for part in reversed(line.split("\r")) if part.strip("\b ")), "")
