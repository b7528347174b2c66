"""Interrupts of the launcher: noted, and acted upon where it suits."""

import signal
import threading
import time
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 0.5  # a terminal, and who started us, may pass on one Ctrl-C each


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP within its context (main thread only).

    No exception comes out of them, so that nothing is left half done. What is ignored
    already, as SIGHUP is by `nohup`, stays ignored.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > _SAME_SECONDS:
            self.count += 1
            self._last = now  # not of one more: who goes on and on is heard
