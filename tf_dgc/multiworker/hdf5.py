"""HDF5 files on disks that may be full: an error of the disk is an `OSError`.

HDF5 cannot close what it cannot write: h5py raises a `RuntimeError`, or nothing at all,
and the process crashes when the file is freed (h5py 3.14). So `writing` lets HDF5 write
through a file that takes everything; what went wrong is raised when HDF5 has closed it.
What Keras opens itself is left to it, and `as_os_errors` says at least what it was.
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
    """A file whose first error is kept; from there on nothing is written to it.

    Attributes:
        error: error of the disk, if there was one.
    """

    error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write all of `content`, and say so whether or not it is true."""
        left = memoryview(content).cast("B")
        size = len(left)
        with self._noted():
            while left and self.error is None:
                left = left[super().write(left) :]
        return size

    def truncate(self, size: int | None = None) -> int:
        """Give the file a size, and say so whether or not it is true."""
        with self._noted():
            if self.error is None:
                super().truncate(size)
        return self.tell() if size is None else size

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error


class Hdf5Writing:
    """An HDF5 file that is written.

    Attributes:
        file: file, open to write.
    """

    def __init__(self, disk: _Disk, file: h5py.File):
        self.file, self._disk = file, disk

    def check(self) -> None:
        """Raise the error of the disk, if there was one, before more is written."""
        if self._disk.error is not None:
            raise self._disk.error


@contextlib.contextmanager
def writing_hdf5(path: pathlib.Path) -> Iterator[Hdf5Writing]:
    """Yield a new file.

    Args:
        path: path of the file.

    Raises:
        OSError: with the path, if the disk does not take all of it.
    """
    with _Disk(path, "w+") as disk:
        try:
            with h5py.File(disk, "w") as file:
                yield Hdf5Writing(disk, file)
        except Exception as error:
            if disk.error is None:
                raise
            raise _failed(disk.error, path) from error
        if disk.error is not None:
            raise _failed(disk.error, path)


def _failed(error: OSError, path: pathlib.Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


@contextlib.contextmanager
def as_os_errors(path: str | os.PathLike) -> Iterator[None]:
    """Make an `OSError` of the `RuntimeError` that h5py raises for a full disk.

    Args:
        path: path of the file that is written within.
    """
    try:
        yield
    except RuntimeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("h5py"):
            raise
        raise OSError(f"HDF5 could not write {str(path)!r}: {error}") from error
