"""Peak memory of a function."""

import ctypes
import gc

from common import processes


def peak_memory(function):
    """Return by how many bytes this process grows at most during a call.

    Memory that was freed before the call is returned to the system first: the function
    could use it without growth.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    processes.forget_peak()
    before = processes.resident()
    function()
    return processes.peak() - before
