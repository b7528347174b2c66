"""Calls functions in new processes, and measures the memory of a process."""

import concurrent.futures
import multiprocessing
import os


def call(function, *arguments):
    """Call a function in a new process, which can still set TensorFlow's threads.

    The process is forked from one that has only imported the package.
    """
    # Keeps the process from importing the sources in the current directory, which may
    # lack native operations, in place of the installed package.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tf_dgc"])
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def resident():
    """Return the bytes that this process has in memory."""
    return _status("VmRSS")


def forget_peak():
    """Reset the peak that `peak` returns."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def peak():
    """Return the most bytes that this process has had in memory since the reset."""
    return _status("VmHWM")


def _status(field):
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(field))
    return 1024 * int(line.split()[1])
