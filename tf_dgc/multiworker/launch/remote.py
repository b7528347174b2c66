"""`tf-dgc remote`: runs a worker on another machine while its launcher is connected."""

import json
import os
import select
import signal
import sys

from tf_dgc.multiworker.launch import worker_processes
from tf_dgc.multiworker.launch.worker_processes import POLL_SECONDS, exit_code

INTERRUPT_SECONDS = 10.0  # for `except KeyboardInterrupt`, unless the launcher says


def main() -> int:
    """Run what a line of standard input describes; return its exit code."""
    # When standard input ends, as it does when ssh ends, the program gets SIGINT, and
    # is killed with all its children 10 s later. A second line ends the program too,
    # and contains the number of seconds.
    lines = _Lines(sys.stdin.fileno())
    first_line = lines.read()
    if not first_line:
        sys.exit("tf-dgc remote: it is run by `tf-dgc run --hosts`, not by hand")
    message = json.loads(first_line)
    try:
        os.chdir(message["directory"])
    except OSError as error:
        sys.exit(f"tf-dgc remote: the directory must be the same as there: {error}")
    if lines.has_line:  # the program is already to end
        return 128 + signal.SIGINT
    environment = {**message["defaults"], **os.environ, **message["environment"]}
    worker = worker_processes.start_process(
        message["command"], environment, sys.stdout.fileno()
    )
    seconds = None
    try:
        while exit_code(worker) is None and seconds is None:
            if lines.wait(POLL_SECONDS):
                seconds = float(lines.read() or INTERRUPT_SECONDS)
    finally:
        worker_processes.end_processes([worker], seconds or 0.0)
    return exit_code(worker) or 0


class _Lines:
    def __init__(self, descriptor: int):
        self._descriptor, self._buffer = descriptor, b""

    @property
    def has_line(self) -> bool:
        """Whether a whole line is in the buffer."""
        return b"\n" in self._buffer

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to read; return whether there is."""
        return self.has_line or bool(
            select.select([self._descriptor], [], [], seconds)[0]
        )

    def read(self) -> bytes:
        """Return the next line; empty at the end of the input."""
        while not self.has_line:
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                return b""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"
