"""Keeps the libraries and compiled modules below a folder in memory until it is ended.

What a machine drops of TensorFlow's gigabyte comes back page by page, some ten of them
per second: tests stood still for a minute. Read at once, it takes seconds.
"""

import ctypes
import mmap
import os
import pathlib
import signal
import sys

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
libc.mlock.argtypes = [pointer, size]


def keep(path):
    """Read a file and forbid that its pages are dropped; say whether that went."""
    with path.open("rb") as file:
        size = len(file.read())
        if not size:
            return True
        start = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        return libc.mlock(start, size) == 0


def main():
    """Keep what is there, or as much of it as this user may."""
    kept = 0
    for path in pathlib.Path(sys.argv[1]).rglob("*"):
        if path.is_file() and (path.suffix == ".pyc" or ".so" in path.name):
            if not keep(path):
                print(f"kept {kept} files; {os.strerror(ctypes.get_errno())}: {path}")
                break
            kept += 1
    signal.pause()


if __name__ == "__main__":
    main()
