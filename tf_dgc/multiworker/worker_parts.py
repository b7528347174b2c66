"""Parts of a backup: files in which each worker saves what differs between workers.

While a part is written or read, optimizers pass their values to it instead of gathering
those of all workers; nothing is communicated.
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
    """Writes the values of this process's replicas, one variable after the other."""

    def __init__(self, writing: hdf5.Hdf5Writing):
        self._writing = writing
        self._count = 0

    def put(self, rows: np.ndarray) -> np.ndarray:
        """Write values `[local replicas, ...]`; return their number in the part."""
        number = np.array([self._count], np.int64)
        self.put_as(str(self._count), rows)
        self._count += 1
        return number

    def put_as(self, name: str, rows: np.ndarray) -> None:
        """Write values under a name, as `put`."""
        # As bytes, because HDF5 has no bfloat16.
        flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        content = flat.reshape(len(rows), rows.nbytes // len(rows))
        dataset = self._writing.file.create_dataset(name, data=content)
        dataset.attrs["dtype"] = rows.dtype.name
        dataset.attrs["shape"] = np.array(rows.shape[1:], np.int64)
        self._writing.check()


class PartReader:
    """Reads what `PartWriter`s wrote, for the same or another number of replicas."""

    # `rows` has file and row of each replica that wrote, at least of the local ones.

    def __init__(
        self,
        rows: Mapping[int, tuple[h5py.File, int]],
        local_replicas: Sequence[int],
        num_replicas: int,
        num_saved: int,
    ):
        self._rows, self._local_replicas = rows, local_replicas
        self._same_number, self._num_saved = num_replicas == num_saved, num_saved

    def take(self, number: np.ndarray) -> np.ndarray:
        """Return the values of all replicas that wrote, `[num_saved, ...]`."""
        # With the same number of replicas now, those of other processes are zeros.
        name = str(int(np.asarray(number).reshape(-1)[0]))
        shape, dtype = self._spec(name)
        values = np.zeros((self._num_saved, *shape), dtype)
        needed = self._local_replicas if self._same_number else range(self._num_saved)
        for replica in needed:
            values[replica] = self._value(name, replica)
        return values

    def take_own(self, name: str) -> list[np.ndarray]:
        """Return each local replica's value; if numbers differ, that of replica 0."""
        replicas = self._local_replicas
        if not self._same_number:
            replicas = [0] * len(replicas)
        return [self._value(name, replica) for replica in replicas]

    def names(self) -> set[str]:
        """Return the names that were passed to `PartWriter.put_as`."""
        file, _ = next(iter(self._rows.values()))
        return {name for name in file if not name.isdecimal()}

    def _spec(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        file, _ = next(iter(self._rows.values()))
        attributes = file[name].attrs
        dtype = tf.as_dtype(str(attributes["dtype"])).as_numpy_dtype
        return tuple(map(int, attributes["shape"])), np.dtype(dtype)

    def _value(self, name: str, replica: int) -> np.ndarray:
        shape, dtype = self._spec(name)
        file, row = self._rows[replica]
        return np.frombuffer(file[name][row].tobytes(), dtype).reshape(shape)


_writer: contextvars.ContextVar[PartWriter | None] = contextvars.ContextVar("writer")
_reader: contextvars.ContextVar[PartReader | None] = contextvars.ContextVar("reader")


def part_being_written() -> PartWriter | None:
    """Return the part that is being written; None if all values are to be gathered."""
    return _writer.get(None)


def part_being_read() -> PartReader | None:
    """Return the reader of parts; None if all values are in one file."""
    return _reader.get(None)


@contextlib.contextmanager
def writing_part(path: pathlib.Path, name: str) -> Iterator[PartWriter]:
    """Write what optimizers save within to a part of the backup `name`."""
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
    rows: Mapping[int, tuple[pathlib.Path, int]],
    local_replicas: Sequence[int],
    num_replicas: int,
    num_saved: int,
) -> Iterator[PartReader]:
    """Load what optimizers load within from parts; arguments as `PartReader`."""
    with contextlib.ExitStack() as stack:
        paths = {path for path, _ in rows.values()}
        files = {path: stack.enter_context(h5py.File(path, "r")) for path in paths}
        open_rows = {r: (files[path], row) for r, (path, row) in rows.items()}
        reader = PartReader(open_rows, local_replicas, num_replicas, num_saved)
        token = _reader.set(reader)
        try:
            yield reader
        finally:
            _reader.reset(token)
