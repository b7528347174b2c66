"""The watchdog: ends this worker if it is stuck after other workers have gone.

A thread of this process cannot do that where another one holds Python's lock for ever.
So a process of its own does (`watchdog_process.py`): it hears from this one whether the
main thread makes progress, and looks at the ports of the other workers when it does
not. It prints the main thread's stack first.
"""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from tf_dgc.multiworker import watchdog_process

_LONGEST_SECONDS = 45.0  # from when another worker is gone to the end of this one
_SHORTEST_SECONDS = 10.0
_STANDARD_ERROR = 2


class Watchdog:
    """The process that watches this one.

    Args:
        name: name of this worker, for the message.
        peers: addresses of the other workers, `host:port`.
        seconds: time without progress, and without another worker, after which this
            worker is ended; between 10 and 45 if it is not.

    Attributes:
        expected: whether this worker still needs the others: before that, and
            afterwards, it is not ended.
    """

    def __init__(self, name: str, peers: Sequence[str], seconds: float):
        self.expected = False
        self._process: subprocess.Popen | None = None
        patience = min(max(seconds, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        program = [sys.executable, "-I", "-S", watchdog_process.__file__]
        arguments = [os.getpid(), _register_signal(), patience, name, *peers]
        with contextlib.suppress(OSError, TypeError):  # no `sys.executable`, no process
            self._process = subprocess.Popen(
                [*program, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C
            )
            os.set_blocking(self._number, False)

    @property
    def _number(self) -> int:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin.fileno()

    def tell(self, progress: bool) -> None:
        """Say that this process runs, and whether its main thread makes progress."""
        if self._process is None:
            return
        word = watchdog_process.FREE
        if self.expected:
            word = watchdog_process.PROGRESS if progress else watchdog_process.NONE
        with contextlib.suppress(OSError):  # it is gone, or has not listened for long
            os.write(self._number, word)

    def end(self) -> None:
        """End the process that watches this one."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)


_running: list[Watchdog] = []


def start(name: str, peers: Sequence[str], seconds: float) -> Watchdog:
    """Start the watchdog of this process, as `Watchdog`."""
    _running.append(Watchdog(name, peers, seconds))
    return _running[-1]


def expect_others(expected: bool) -> None:
    """Say whether this worker needs the others from now on, which so must not end."""
    for watchdog in _running:
        watchdog.expected = expected
        watchdog.tell(progress=True)


def _register_signal() -> int:
    """Return the signal at which this process prints its main thread's stack, or 0.

    `faulthandler` does so without Python's lock. Printing other threads may crash.
    """
    number = getattr(signal, "SIGRTMIN", 0) and signal.SIGRTMIN + 11
    if not number or signal.getsignal(number) is not signal.SIG_DFL:
        return 0  # the program's own
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.register(number, file=_STANDARD_ERROR, all_threads=False)
        return int(number)
    return 0
