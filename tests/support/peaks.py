"""How much memory something takes at its peak."""

import ctypes
import gc

from common import processes


def peak_of(function):
    """Return by how many bytes this process grows at most while it calls.

    What was freed before goes back to the system first, or it could be taken unseen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    processes.forget_peak()
    before = processes.resident()
    function()
    return processes.peak() - before
