"""Executes a program that is killed when its launcher ends; run as a file.

    python -I -S worker_start.py LAUNCHER PROGRAM ARGUMENT ...

`LAUNCHER` is the PID of the process that starts this one. Imports nothing of the
package.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


def main(launcher: int, command: list[str]) -> None:
    """Arrange to be killed when the launcher ends, then execute the command."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != launcher:
        sys.exit("the launcher is gone")
    # A shell makes background processes ignore it, and the program would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
