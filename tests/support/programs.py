"""Run a command to its end, and show what it said where a test fails."""

import functools
import os
import subprocess


@functools.cache
def on_its_own_loopback():
    """Return what to put before a command to give it a loopback that it has alone.

    In a network namespace, which ends with the command; /sys shows that one's bytes.

    Returns:
        The beginning of a command; None where the system allows no namespaces.
    """
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    steps = 'mount -t sysfs sysfs /sys && ip link set lo up && exec "$@"'
    before = ["unshare", "--net", "--mount", *root, "sh", "-c", steps, "sh"]
    try:
        tried = subprocess.run([*before, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return None if tried.returncode else before


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
