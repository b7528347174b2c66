"""Parts: of what differs between workers, each saves its own, in a file of its own.

While one is written or read, optimizers hand their values to it, in place of gathering
those of all workers; nobody is asked for anything.
"""

import contextlib
import contextvars
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import h5py
import numpy as np
import tensorflow as tf

from tf_dgc.multiworker import hdf5


class PartWriter:
    """Takes values of the replicas of this process, one variable after the other.

    Args:
        writing: file of the part.
    """

    def __init__(self, writing: hdf5.Hdf5Writing):
        self._writing = writing
        self._count = 0

    def put(self, rows: np.ndarray) -> np.ndarray:
        """Write values, and return what stands for them in Keras's file.

        Args:
            rows: value of each local replica, `[local replicas, ...]`.
        """
        place = np.array([self._count], np.int64)
        self.put_as(str(self._count), rows)
        self._count += 1
        return place

    def put_as(self, name: str, rows: np.ndarray) -> None:
        """Write values by a name.

        Args:
            name: name of the values.
            rows: value of each local replica, as in `put`.
        """
        # As bytes, because HDF5 knows no bfloat16.
        flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        content = flat.reshape(len(rows), rows.nbytes // len(rows))
        made = self._writing.file.create_dataset(name, data=content)
        made.attrs["dtype"] = rows.dtype.name
        made.attrs["shape"] = np.array(rows.shape[1:], np.int64)
        self._writing.check()


class PartReader:
    """Gives back what writers were given, to as many replicas or to others.

    Args:
        places: file and row of each replica that wrote, by replica; at least those of
            the replicas that ask.
        asking: numbers of the replicas of this process.
        number: number of replicas there are now.
        saved: number of replicas that wrote.
    """

    def __init__(
        self,
        places: Mapping[int, tuple[h5py.File, int]],
        asking: Sequence[int],
        number: int,
        saved: int,
    ):
        self._places, self._asking = places, asking
        self._as_many, self._saved = number == saved, saved

    def take(self, place: np.ndarray) -> np.ndarray:
        """Return values of all replicas that wrote, `[N, ...]`.

        If there are as many now, those that are not this process's are zeros.

        Args:
            place: number that `Writer.put` returned, `[1]`.
        """
        name = str(int(np.asarray(place).reshape(-1)[0]))
        asked = self._asking if self._as_many else range(self._saved)
        shape, dtype = self._form(name)
        values = np.zeros((self._saved, *shape), dtype)
        for replica in asked:
            values[replica] = self._row(name, replica)
        return values

    def take_own(self, name: str) -> list[np.ndarray]:
        """Return the value of each local replica; of replica 0, if numbers differ.

        Args:
            name: name that was given to `Writer.put_as`.
        """
        return [self._row(name, r if self._as_many else 0) for r in self._asking]

    def names(self) -> set[str]:
        """Return the names that were given to `Writer.put_as`."""
        file, _ = next(iter(self._places.values()))
        return {name for name in file if not name.isdecimal()}

    def _form(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        file, _ = next(iter(self._places.values()))
        attributes = file[name].attrs
        dtype = tf.as_dtype(str(attributes["dtype"])).as_numpy_dtype
        return tuple(map(int, attributes["shape"])), np.dtype(dtype)

    def _row(self, name: str, replica: int) -> np.ndarray:
        shape, dtype = self._form(name)
        file, row = self._places[replica]
        return np.frombuffer(file[name][row].tobytes(), dtype).reshape(shape)


_writer: contextvars.ContextVar[PartWriter | None] = contextvars.ContextVar("writer")
_reader: contextvars.ContextVar[PartReader | None] = contextvars.ContextVar("reader")


def part_being_written() -> PartWriter | None:
    """Return the part that is written here; None if all are to be gathered."""
    return _writer.get(None)


def part_being_read() -> PartReader | None:
    """Return what is read of parts; None if all values are in one file."""
    return _reader.get(None)


@contextlib.contextmanager
def writing_part(path: pathlib.Path, name: str) -> Iterator[PartWriter]:
    """Let what is saved within go to a part.

    Args:
        path: path of the part.
        name: name of the backup that it belongs to.

    Raises:
        OSError: if the disk does not take all of it.
    """
    with hdf5.writing_hdf5(path) as part:
        part.file.attrs["backup"] = name
        writer = PartWriter(part)
        token = _writer.set(writer)
        try:
            yield writer
        finally:
            _writer.reset(token)


@contextlib.contextmanager
def reading_part(
    paths: Mapping[int, tuple[pathlib.Path, int]],
    asking: Sequence[int],
    number: int,
    saved: int,
) -> Iterator[PartReader]:
    """Let what is loaded within come from parts.

    Args:
        paths: path of the part and row in it of each replica, as in `Reader`.
        asking: numbers of the replicas of this process.
        number: number of replicas there are now.
        saved: number of replicas that wrote.
    """
    with contextlib.ExitStack() as stack:
        different = {path for path, _ in paths.values()}
        files = {p: stack.enter_context(h5py.File(p, "r")) for p in different}
        places = {r: (files[path], row) for r, (path, row) in paths.items()}
        reader = PartReader(places, asking, number, saved)
        token = _reader.set(reader)
        try:
            yield reader
        finally:
            _reader.reset(token)
