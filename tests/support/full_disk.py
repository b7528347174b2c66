"""A disk on which no file has room."""

import contextlib
import resource


@contextlib.contextmanager
def disk_of(size):
    """Let no file become larger, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
