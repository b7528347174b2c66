"""HDF5 files that raise an `OSError` if the disk is full.

HDF5 cannot close a file that it cannot write: h5py raises a `RuntimeError`, or nothing
at all, and the process crashes when the file is freed (h5py 3.14). So `writing_hdf5`
lets HDF5 write through a file that accepts everything, and raises the error when HDF5
has closed it. For files that Keras opens, `as_os_errors` converts the exception.
"""

import contextlib
import io
import os
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any

import h5py


class _Disk(io.FileIO):
    """A file that stores its first error, and ignores writes after it."""

    error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write all of `content`; report success even after an error."""
        remaining = memoryview(content).cast("B")
        size = len(remaining)
        with self._storing_error():
            while remaining and self.error is None:
                remaining = remaining[super().write(remaining) :]
        return size

    def truncate(self, size: int | None = None) -> int:
        """Set the file's size; report success even after an error."""
        with self._storing_error():
            if self.error is None:
                super().truncate(size)
        return self.tell() if size is None else size

    @contextlib.contextmanager
    def _storing_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error


class Hdf5Writing:
    """An HDF5 file, `file`, that is open for writing."""

    def __init__(self, disk: _Disk, file: h5py.File):
        self.file, self._disk = file, disk

    def check(self) -> None:
        """Raise the error of the disk, if there was one."""
        if self._disk.error is not None:
            raise self._disk.error


@contextlib.contextmanager
def writing_hdf5(path: pathlib.Path) -> Iterator[Hdf5Writing]:
    """Yield a new file; raise `OSError` with the path if the disk does not take it."""
    with _Disk(path, "w+") as disk:
        try:
            with h5py.File(disk, "w") as file:
                yield Hdf5Writing(disk, file)
        except Exception as error:
            if disk.error is None:
                raise
            raise _with_path(disk.error, path) from error
        if disk.error is not None:
            raise _with_path(disk.error, path)


def _with_path(error: OSError, path: pathlib.Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


@contextlib.contextmanager
def as_os_errors(path: str | os.PathLike) -> Iterator[None]:
    """Convert the `RuntimeError` that h5py raises for a full disk to an `OSError`."""
    try:
        yield
    except RuntimeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("h5py"):
            raise
        raise OSError(f"HDF5 could not write {str(path)!r}: {error}") from error
