"""Run a command to its end, and show what it said where a test fails."""

import os
import subprocess


def run(command, merged=False, **environment):
    """Return what `subprocess.run` does, as text; it has 280 s.

    Args:
        command: program and its arguments.
        merged: whether `stdout` has both outputs, in their order.
        **environment: variables beside those of this process.
    """
    finished = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **environment},
    )
    print(finished.stdout[-5000:], (finished.stderr or "")[-3000:])
    return finished
