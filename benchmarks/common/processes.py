"""A process of its own, for what is measured only once in one; and its memory."""

import concurrent.futures
import multiprocessing
import os


def call(function, *arguments):
    """Call a function in a new process: TensorFlow's threads are chosen only once.

    It is forked from one that has imported the package, and done nothing else.
    """
    # It would import from the current directory first: sources instead of what is
    # installed, and without the native operations.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tf_dgc"])
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def resident():
    """Return the bytes that this process has in memory."""
    return _status("VmRSS")


def forget_peak():
    """Let `peak` begin from here."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def peak():
    """Return the most bytes that this process has had in memory."""
    return _status("VmHWM")


def _status(field):
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith(field))
    return 1024 * int(line.split()[1])
