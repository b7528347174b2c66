"""Becomes a worker that ends with its launcher: run as a file, before the program.

    python -I -S worker_start.py LAUNCHER PROGRAM ARGUMENT ...

`LAUNCHER` is the number of the process that starts this one. Nothing of the package is
imported, and the program takes this process's place.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


def main(launcher: int, command: list[str]) -> None:
    """Let this process be killed when the launcher ends, then run the command."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != launcher:
        sys.exit("the launcher is gone")
    # What a shell starts in the background ignores it, and so would the program.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
