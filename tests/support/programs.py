"""Runs commands and prints their output, which pytest shows if a test fails."""

import functools
import os
import subprocess


@functools.cache
def loopback_prefix():
    """Return a command prefix that gives a command a loopback of its own.

    The command runs in a network namespace that ends with it; /sys counts the bytes of
    this loopback.

    Returns:
        Words to put before a command; None if the system allows no namespaces.
    """
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    steps = 'mount -t sysfs sysfs /sys && ip link set lo up && exec "$@"'
    prefix = ["unshare", "--net", "--mount", *root, "sh", "-c", steps, "sh"]
    try:
        result = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return None if result.returncode else prefix


def run(command, merged=False, **environment):
    """Run a command for 280 s at most; return the result of `subprocess.run` as text.

    Args:
        command: program and its arguments.
        merged: whether `stdout` has both outputs, in their order.
        **environment: variables in addition to those of this process.
    """
    result = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, **environment},
    )
    print(result.stdout[-5000:], (result.stderr or "")[-3000:])
    return result
