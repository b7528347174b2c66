"""Generations: the files of one backup, and the manifest that makes them one.

Files of generation 3: `backup-3.part-0.h5` of worker 0, and so on; what all workers
have alike in `backup-3.model-0.weights.h5`; and `backup-3.manifest-0.json`, which names
all of them with their checksums, and without which the others count for nothing.
"""

import json
import pathlib
import re
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from tf_dgc.checkpoint import saving

# What is written here and nothing else, as the others may be of the user's own.
_NAME = re.compile(
    rf"(?:{saving.UNFINISHED})?backup-(\d+)\."
    r"(?:part-\d+\.h5|model-\d+\.weights\.h5|manifest-\d+\.json)"
)
_MANIFEST = re.compile(r"backup-(\d+)\.manifest-\d+\.json")
_AT_ONCE = 2**24  # bytes that are read of a file at a time


class Generation(NamedTuple):
    """What a manifest says.

    Attributes:
        number: number of the backup, 1 or more.
        name: name that no other backup has.
        workers: notes of each worker, by its index.
    """

    number: int
    name: str
    workers: list[dict[str, Any]]

    @property
    def num_replicas(self) -> int:
        """Number of replicas that wrote."""
        return sum(len(worker["replicas"]) for worker in self.workers)

    def places(self) -> dict[int, tuple[str, int]]:
        """Return the part, and the row in it, of every replica."""
        return {
            replica: (worker["part"], row)
            for worker in self.workers
            for row, replica in enumerate(worker["replicas"])
        }

    def model_for(self, worker: int, as_many: bool) -> str:
        """Return the file of what all have alike that a worker is to read.

        Args:
            worker: index of the worker.
            as_many: whether there are as many workers as wrote.
        """
        own = self.workers[worker]["model"] if as_many else None
        return own or next(filter(None, (w["model"] for w in self.workers)))


def part_name(number: int, worker: int) -> str:
    """Return the name of a worker's part."""
    return f"backup-{number}.part-{worker}.h5"


def model_name(number: int, worker: int) -> str:
    """Return the name of the file of what all workers have alike, by its writer."""
    return f"backup-{number}.model-{worker}.weights.h5"


def describe(path: pathlib.Path) -> dict[str, int]:
    """Return what a manifest says of a file."""
    return {"bytes": path.stat().st_size, "crc32": _checksum(path)}


def write_manifest(directory: pathlib.Path, worker: int, found: Generation) -> None:
    """Write a manifest, complete or not at all.

    Args:
        directory: directory of the files.
        worker: index of the worker that writes it.
        found: content of the manifest.
    """
    text = json.dumps(found._asdict(), sort_keys=True)
    path = directory / f"backup-{found.number}.manifest-{worker}.json"
    with saving.replacing(path) as unfinished:
        whole = {"manifest": text, "crc32": zlib.crc32(text.encode())}
        unfinished.write_text(json.dumps(whole))


def number_of(path: pathlib.Path) -> int:
    """Return the number of the backup that a file is of, by its name; 0 if of none."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def find(directory: pathlib.Path) -> tuple[dict[int, Generation], dict[str, str]]:
    """Return the generations that have a manifest, and what cannot be read."""
    found: dict[int, Generation] = {}
    unreadable: dict[str, str] = {}
    for path in sorted(_files(directory)):
        if _MANIFEST.fullmatch(path.name):
            try:
                generation = _read_manifest(path)
                found[generation.number] = generation
            except (OSError, ValueError, KeyError, TypeError) as error:
                unreadable[str(path)] = f"is damaged: {error}"
    return found, unreadable


def last_number(directory: pathlib.Path) -> int:
    """Return the largest number that any file has, complete or not; 0 without files."""
    return max(map(number_of, _files(directory)), default=0)


def problem(directory: pathlib.Path, found: Generation, name: str) -> str | None:
    """Return what is wrong with a file of a generation, None if nothing is.

    Args:
        directory: directory of the files.
        found: content of the manifest.
        name: name of the file.
    """
    path = directory / name
    said = next(w["files"][name] for w in found.workers if name in w["files"])
    if not path.exists():
        return "is not there"
    try:
        if describe(path) == said:
            return None
        # HDF5's library may end the process over a damaged file: look at the bytes.
        content = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error}"
    others = {name.decode() for name in re.findall(rb"[0-9a-f]{32}-\d+", content)}
    if others and found.name not in others:
        return f"belongs to another backup, {min(others)!r}"
    return "is damaged: it is not what was written"


def remove(directory: pathlib.Path, kept: Iterable[int], last: int) -> None:
    """Remove all files, complete or not, of generations up to `last` but some.

    Manifests go first: what is left of a generation after that counts for nothing.

    Args:
        directory: directory of the files.
        kept: numbers of the generations that stay.
        last: largest number that is removed.
    """
    gone = set(range(last + 1)) - set(kept)
    old = [path for path in _files(directory) if number_of(path) in gone]
    for path in sorted(old, key=lambda p: not _MANIFEST.fullmatch(p.name)):
        path.unlink(missing_ok=True)


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    if not directory.exists():
        return []
    return [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]


def _read_manifest(path: pathlib.Path) -> Generation:
    whole = json.loads(path.read_text())
    text = whole["manifest"]
    if zlib.crc32(text.encode()) != whole["crc32"]:
        raise ValueError("it is not what was written")
    found = Generation(**json.loads(text))
    if found.number != number_of(path):
        raise ValueError(f"it is that of backup {found.number}")
    return found


def _checksum(path: pathlib.Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while content := file.read(_AT_ONCE):
            checksum = zlib.crc32(content, checksum)
    return checksum
