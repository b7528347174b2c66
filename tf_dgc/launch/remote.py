"""The far end of `tf-dgc run --hosts`: runs a worker while its launcher is there."""

import json
import os
import select
import sys

from tf_dgc.launch import worker_processes
from tf_dgc.launch.worker_processes import POLL_SECONDS, exit_code

INTERRUPT_SECONDS = 10.0  # for `except KeyboardInterrupt`, if nothing is said


def main() -> int:
    """Run what a line of standard input says; return its exit code.

    When standard input ends, as it does with the ssh that this is run by, the program
    gets SIGINT, and is killed with all its children if it has not ended 10 s later; or
    when a second line says so, and as many seconds later as that says.
    """
    told = sys.stdin.fileno()
    line = _first_line(told)
    if not line:
        sys.exit("tf-dgc remote: it is run by `tf-dgc run --hosts`, not by hand")
    asked = json.loads(line)
    try:
        os.chdir(asked["directory"])
    except OSError as error:
        sys.exit(f"tf-dgc remote: the directory must be the same as there: {error}")
    environment = {**asked["defaults"], **os.environ, **asked["environment"]}
    worker = worker_processes.start(asked["command"], environment, sys.stdout.fileno())
    seconds = None
    try:
        while exit_code(worker) is None and seconds is None:
            seconds = _seconds_to_end(told)
    finally:
        worker_processes.end([worker], seconds or 0.0)
    return exit_code(worker) or 0


def _first_line(told: int) -> bytes:
    """Return what comes up to the end of a line; nothing if there is no end."""
    found = b""
    while not found.endswith(b"\n"):
        part = os.read(told, 1 << 16)
        if not part:
            return b""
        found += part
    return found


def _seconds_to_end(told: int) -> float | None:
    """Wait for a moment; return in how many seconds the program is to end, or None."""
    ready, _, _ = select.select([told], [], [], POLL_SECONDS)
    if not ready:
        return None
    return float(_first_line(told) or INTERRUPT_SECONDS)
