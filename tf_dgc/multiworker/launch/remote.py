"""The far end of `tf-dgc run --hosts`: runs a worker while its launcher is there."""

import json
import os
import select
import signal
import sys

from tf_dgc.multiworker.launch import worker_processes
from tf_dgc.multiworker.launch.worker_processes import POLL_SECONDS, exit_code

INTERRUPT_SECONDS = 10.0  # for `except KeyboardInterrupt`, if nothing is said


def main() -> int:
    """Run what a line of standard input says; return its exit code.

    When standard input ends, as it does with the ssh that this is run by, the program
    gets SIGINT, and is killed with all its children if it has not ended 10 s later; or
    when a second line says so, and as many seconds later as that says.
    """
    told = _Told(sys.stdin.fileno())
    line = told.line()
    if not line:
        sys.exit("tf-dgc remote: it is run by `tf-dgc run --hosts`, not by hand")
    asked = json.loads(line)
    try:
        os.chdir(asked["directory"])
    except OSError as error:
        sys.exit(f"tf-dgc remote: the directory must be the same as there: {error}")
    if told.has_line:  # it is to end already
        return 128 + signal.SIGINT
    environment = {**asked["defaults"], **os.environ, **asked["environment"]}
    worker = worker_processes.start_process(
        asked["command"], environment, sys.stdout.fileno()
    )
    seconds = None
    try:
        while exit_code(worker) is None and seconds is None:
            seconds = _seconds_to_end(told)
    finally:
        worker_processes.end_processes([worker], seconds or 0.0)
    return exit_code(worker) or 0


class _Told:
    """Lines that come one after another, or at once.

    Args:
        number: number of the file that they are read from.
    """

    def __init__(self, number: int):
        self._number, self._read = number, b""

    @property
    def has_line(self) -> bool:
        """Whether one has been read that was not asked for yet."""
        return b"\n" in self._read

    def is_ready(self, seconds: float) -> bool:
        """Wait until there is something, or the end; return whether there is."""
        return self.has_line or bool(select.select([self._number], [], [], seconds)[0])

    def line(self) -> bytes:
        """Return the next line; nothing if it has no end."""
        while not self.has_line:
            part = os.read(self._number, 1 << 16)
            if not part:
                return b""
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line + b"\n"


def _seconds_to_end(told: _Told) -> float | None:
    """Wait for a moment; return in how many seconds the program is to end, or None."""
    if not told.is_ready(POLL_SECONDS):
        return None
    return float(told.line() or INTERRUPT_SECONDS)
