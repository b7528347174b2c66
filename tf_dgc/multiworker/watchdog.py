"""The watchdog: a process that ends this worker if it is stuck and others have gone.

A thread of this worker could not do that if another one held Python's lock for ever.
The worker tells the process (`watchdog_process.py`) whether its main thread makes
progress. If it does not, the process connects to the ports of the other workers. Before
it ends the worker, it has the main thread's stack printed.
"""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from tf_dgc.multiworker import watchdog_process

_MAX_SECONDS = 45.0
_MIN_SECONDS = 10.0
_STANDARD_ERROR = 2


class Watchdog:
    """The process that ends this worker, if it needs others, without progress."""

    # After `seconds`, limited to 10 to 45.

    def __init__(self, name: str, peers: Sequence[str], seconds: float):
        self.needs_others = False
        self._process: subprocess.Popen | None = None
        patience = min(max(seconds, _MIN_SECONDS), _MAX_SECONDS)
        program = [sys.executable, "-I", "-S", watchdog_process.__file__]
        arguments = [os.getpid(), _register_signal(), patience, name, *peers]
        with contextlib.suppress(OSError, TypeError):  # without `sys.executable`
            self._process = subprocess.Popen(
                [*program, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C
            )
            os.set_blocking(self._descriptor, False)

    @property
    def _descriptor(self) -> int:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin.fileno()

    def tell(self, progress: bool) -> None:
        """Tell the process whether this worker's main thread makes progress."""
        if self._process is None:
            return
        message = watchdog_process.FREE
        if self.needs_others:
            message = watchdog_process.PROGRESS if progress else watchdog_process.NONE
        with contextlib.suppress(OSError):  # it is gone, or has not read for long
            os.write(self._descriptor, message)

    def end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)


_running: list[Watchdog] = []


def start(name: str, peers: Sequence[str], seconds: float) -> Watchdog:
    """Start the watchdog of this worker; arguments as `Watchdog`."""
    _running.append(Watchdog(name, peers, seconds))
    return _running[-1]


def expect_others(expected: bool) -> None:
    """Set whether this worker needs the others from now on."""
    for watchdog in _running:
        watchdog.needs_others = expected
        watchdog.tell(progress=True)


def _register_signal() -> int:
    """Return the signal that prints the main thread's stack, or 0."""
    # `faulthandler` needs no lock of Python for that. Printing other threads may crash.
    number = getattr(signal, "SIGRTMIN", 0) and signal.SIGRTMIN + 11
    if not number or signal.getsignal(number) is not signal.SIG_DFL:
        return 0  # the program uses it
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.register(number, file=_STANDARD_ERROR, all_threads=False)
        return int(number)
    return 0
