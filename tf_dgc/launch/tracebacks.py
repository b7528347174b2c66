"""Tracebacks in what a program prints: those of interrupts are left out."""

import re

_BEGIN = "Traceback (most recent call last):"
_BEFORE = re.compile(
    r"Exception ignored |Exception in thread |Error in sys\.excepthook"
)
_BETWEEN = re.compile(
    r"During handling of the above exception|Original exception was:"
    r"|The above exception was the direct cause"
)
_INTERRUPT = re.compile(r"(?:\w+\.)*KeyboardInterrupt\b")


class InterruptFilter:
    """Leaves out tracebacks that end with `KeyboardInterrupt`, of a program's lines.

    Several in a row, as of an error while another one was handled, are one: what the
    last one ends with counts. They are held back until that is known. One without an
    end is left out too: the program was killed while it printed that.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._ended = False  # the last line that is not empty is an exception
        self._interrupted = False  # and that is `KeyboardInterrupt`

    def feed(self, line: str) -> list[str]:
        """Return the lines that can be shown by now, with the next one."""
        begins = line == _BEGIN or bool(_BEFORE.match(line))
        if not self._held:
            self._held = [line] if begins else []
            return [] if begins else [line]
        if begins or _BETWEEN.match(line):
            self._ended = self._interrupted = False
        elif line and not line.startswith(" "):
            if self._ended:  # the program goes on
                return [*self.close(), line]
            self._ended = True
            self._interrupted = bool(_INTERRUPT.match(line))
        self._held.append(line)
        return []

    def close(self) -> list[str]:
        """Return what is held back and no interrupt's."""
        held = self._held if self._ended and not self._interrupted else []
        self._held, self._ended, self._interrupted = [], False, False
        return held
