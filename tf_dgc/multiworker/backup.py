"""Backups: what training would go on from, a part of each worker and a manifest.

Nothing of a model's size travels between workers. Where all see one directory, the
first worker writes what all have alike; where each has its own, all of them do.
"""

import contextlib
import json
import pathlib
import re
import uuid
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import h5py
import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import save_hooks
from tf_dgc.multiworker import (
    consensus,
    consensus_weights,
    hdf5,
    saving,
    worker_parts,
    workers,
)
from tf_dgc.multiworker.layer_statistics import average_statistics

# --- Generations: the files of one backup, and the manifest that makes them one.
#
# Files of generation 3: `backup-3.part-0.h5` of worker 0, and so on; what all workers
# have alike in `backup-3.model-0.weights.h5`; and `backup-3.manifest-0.json`, which
# names
# all of them with their checksums, and without which the others count for nothing.

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


def describe_generation(path: pathlib.Path) -> dict[str, int]:
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


def generation_number(path: pathlib.Path) -> int:
    """Return the number of the backup that a file is of, by its name; 0 if of none."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def find_generation(
    directory: pathlib.Path,
) -> tuple[dict[int, Generation], dict[str, str]]:
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
    return max(map(generation_number, _files(directory)), default=0)


def generation_problem(
    directory: pathlib.Path, found: Generation, name: str
) -> str | None:
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
        if describe_generation(path) == said:
            return None
        # HDF5's library may end the process over a damaged file: look at the bytes.
        content = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error}"
    others = {name.decode() for name in re.findall(rb"[0-9a-f]{32}-\d+", content)}
    if others and found.name not in others:
        return f"belongs to another backup, {min(others)!r}"
    return "is damaged: it is not what was written"


def remove_generation(directory: pathlib.Path, kept: Iterable[int], last: int) -> None:
    """Remove all files, complete or not, of generations up to `last` but some.

    Manifests go first: what is left of a generation after that counts for nothing.

    Args:
        directory: directory of the files.
        kept: numbers of the generations that stay.
        last: largest number that is removed.
    """
    gone = set(range(last + 1)) - set(kept)
    old = [path for path in _files(directory) if generation_number(path) in gone]
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
    if found.number != generation_number(path):
        raise ValueError(f"it is that of backup {found.number}")
    return found


def _checksum(path: pathlib.Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while content := file.read(_AT_ONCE):
            checksum = zlib.crc32(content, checksum)
    return checksum


# --- The position of a training, and the file that has it, with what all have alike.

_GROUP = "tf_dgc_backup"
_MODEL = "tf_dgc_model"
_NAMED = 8  # variables that differ; more are counted


class TrainingPosition(NamedTuple):
    """Where training was.

    Attributes:
        epoch: number of the epoch to go on with, from 0.
        batches: number of this epoch's batches that are done.
        metrics: values of the model's metric variables, if batches are done.
    """

    epoch: int
    batches: int
    metrics: list[Any]


def read_position(model: keras.Model, epoch: int, batches: int) -> TrainingPosition:
    """Return where `model` is; call it on every worker."""
    metrics = model.metrics_variables if batches else []
    return TrainingPosition(epoch, batches, [v.numpy() for v in metrics])


def write_position(
    model: keras.Model, now: TrainingPosition, name: str, path: pathlib.Path
) -> None:
    """Write the weights of a model, as Keras does, and where its training is.

    Args:
        model: Keras model, built.
        now: position of the training.
        name: name of the backup that the file belongs to.
        path: path of the file.

    Raises:
        OSError: if the disk does not take all of it.
    """
    with hdf5.writing_hdf5(path) as writing:
        writing.file.attrs["backup"] = name
        save_hooks.save_weights(model, writing.file, writing.check)
        group = writing.file.create_group(_GROUP)
        group.attrs["epoch"] = now.epoch
        group.attrs["batches"] = now.batches
        for i, value in enumerate(now.metrics):
            group.create_dataset(str(i), data=value)
        # A dataset, as HDF5's attributes hold no more than 64 kB.
        text = json.dumps(describe(model)).encode()
        writing.file.create_dataset(_MODEL, data=np.frombuffer(text, np.uint8))
        writing.check()


def load_position(path: pathlib.Path) -> TrainingPosition:
    """Return the position that `write` was given."""
    with h5py.File(path, "r") as file:
        group = file[_GROUP]
        metrics = [group[str(i)][()] for i in range(len(group))]
        epoch, batches = (int(group.attrs[name]) for name in ("epoch", "batches"))
    return TrainingPosition(epoch, batches, metrics)


def describe(model: keras.Model) -> dict[str, Any]:
    """Return the weights of a model, each by path, shape and dtype, and its optimizer.

    Without seeds and metrics, which a model creates while it trains.
    """
    optimizer = model.optimizer
    text = repr(optimizer)
    if " object at 0x" in text:
        text = type(optimizer).__name__
    weights = [[v.path, list(v.shape), v.dtype] for v in model.weights]
    return {"weights": weights, "optimizer": text}


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """Return what `describe` said of the model that was written; empty if it is old."""
    with h5py.File(path, "r") as file:
        if _MODEL not in file:
            return {}
        return json.loads(file[_MODEL][()].tobytes())


def differences(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Return how a model differs from the one that was saved, a line for each weight.

    Keras numbers layers without a name, so paths may differ where models do not: two
    models are alike if shapes and dtypes are, in order or by path.

    Args:
        saved: description of the model that was saved, empty if it is not known.
        own: description of the model that is to be loaded.
    """
    if not saved:
        return []
    before, now = saved["weights"], own["weights"]
    forms_before = {path: form for path, *form in before}
    forms_now = {path: form for path, *form in now}
    in_order = [form for _, *form in before] == [form for _, *form in now]
    if in_order or forms_before == forms_now:
        return []
    if len(before) == len(now):
        pairs = zip(before, now, strict=True)
        lines = [
            _difference(path, form, other)
            for (path, *form), (_, *other) in pairs
            if form != other
        ]
    else:
        lines = [f"{len(before)} weights in the backup, {len(now)} in this model"]
        for path, form in {**forms_before, **forms_now}.items():
            there, here = forms_before.get(path), forms_now.get(path)
            if there is None or here is None:
                where = "the backup" if here is None else "this model"
                lines.append(f"{path}: {_say(form)} in {where} alone")
            elif there != here:
                lines.append(_difference(path, there, here))
    if len(lines) > _NAMED:
        lines = [*lines[:_NAMED], f"and {len(lines) - _NAMED} more"]
    return lines


def _difference(path: str, saved: Sequence[Any], own: Sequence[Any]) -> str:
    return f"{path}: {_say(saved)} in the backup, {_say(own)} in this model"


def _say(form: Sequence[Any]) -> str:
    shape, dtype = form
    return f"{dtype} {tuple(shape)}"


_WHAT_TO_DO = (
    "Every worker needs its part of the last backup, and what all have alike; another "
    "number of workers needs the parts of all. Bring back what is named, for example "
    "from a copy of the directory; or, if every worker wrote to a directory of its "
    "own, start as many workers, each where it was, or put the files of all into one "
    "directory that all can see. To start anew, delete the backups."
)


def own_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Return what belongs to each worker beside its optimizer's state, by a name.

    The states of `keras.random.SeedGenerator`s, as of `Dropout`, which Keras does not
    save, and the loss scale.
    """
    streams = [v for v in model.variables if v.name == "seed_generator_state"]
    found = {f"stream {i}": v for i, v in enumerate(streams)}
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.built:
        found["loss scale"] = optimizer.dynamic_scale
        found["steps of loss scale"] = optimizer.step_counter
    return found


class BackupFolder:
    """The backups in a directory, that all workers see or each has for itself.

    Make it, and call its methods, on every worker.

    Args:
        strategy: strategy of the workers.
        directory: path of the directory, local.

    Raises:
        RuntimeError: if a worker does not come within `TF_DGC_TIMEOUT` seconds.
    """

    def __init__(self, strategy: tf.distribute.Strategy, directory: pathlib.Path):
        self._strategy, self._directory = strategy, directory
        several = consensus.is_multi_worker(strategy)
        self._worker = workers.index(strategy) if several else 0
        self._shared = not several or saving.is_one_path(strategy, directory / "backup")
        self._run = ""  # name that all workers have drawn
        self._number = 0
        self._kept: list[int] = []

    # --- find and read --------------------------------------------------------------

    def find(self) -> Generation | None:
        """Return the last backup that all workers can read; None if there is none.

        Raises:
            ValueError: on all workers, if there are some and none can be read.
        """
        mine, unreadable = find_generation(self._directory)
        note = {
            "where": self._where(),
            "names": {str(number): g.name for number, g in mine.items()},
            "unreadable": unreadable,
            "last": last_number(self._directory),
            "draw": uuid.uuid4().hex,
        }
        notes = self._share(note, "find the last backup")
        self._run = notes[0]["draw"]
        self._number = max(n["last"] for n in notes)
        wrong = {k: v for n in notes for k, v in n["unreadable"].items()}
        for number in sorted(mine, reverse=True):
            name = mine[number].name
            if any(n["names"].get(str(number)) != name for n in notes):
                continue
            found = self._problems(mine[number])
            if found:
                wrong |= found
                continue
            newer = {k: v for k, v in wrong.items() if _number(k) > number}
            if newer:
                text = f"Going on from backup {number}, as newer ones cannot be read"
                warnings.warn(f"{text}: {newer}", stacklevel=3)
            self._kept = [number]
            return mine[number]
        if wrong or any(n["names"] for n in notes):
            seen = [f"{path!r}: {what!r}" for path, what in wrong.items()]
            seen = seen or [_has(n["where"], n["names"].values()) for n in notes]
            raise ValueError(
                f"No backup can be read by all workers. {_WHAT_TO_DO} "
                f"Received: backup_dir={str(self._directory)!r}; {'; '.join(seen)}"
            )
        return None

    def _problems(self, found: Generation) -> dict[str, str]:
        """Return what is wrong with files that any worker needs, on all workers."""
        here = self._directory
        names = [self._model_of(found), *(name for name, _ in self._places(found))]
        mine = {
            str(here / name): wrong
            for name in dict.fromkeys(names)
            if (wrong := generation_problem(here, found, name))
        }
        notes = self._share(mine, "look at the last backup")
        return {path: wrong for note in notes for path, wrong in note.items()}

    @contextlib.contextmanager
    def reading(
        self, found: Generation
    ) -> Iterator[tuple[pathlib.Path, TrainingPosition, worker_parts.PartReader]]:
        """Let what is loaded come from a backup.

        Args:
            found: backup that `find` returned.

        Returns:
            Context manager of the weights file to load, where training was, and what
            differs between workers.
        """
        path = self.weights_file(found)
        places = found.places()
        needed = set(self._places(found))
        asked = {
            replica: (self._directory / name, row)
            for replica, (name, row) in places.items()
            if (name, row) in needed
        }
        number = self._strategy.num_replicas_in_sync
        sizes = self._replicas(), number, found.num_replicas
        with worker_parts.reading_part(asked, *sizes) as reader:
            yield path, load_position(path), reader

    def weights_file(self, found: Generation) -> pathlib.Path:
        """Return the file of a backup with the weights that this worker reads."""
        return self._directory / self._model_of(found)

    def _places(self, found: Generation) -> list[tuple[str, int]]:
        """Return part and row of the replicas that this worker needs."""
        places = found.places()
        as_many = found.num_replicas == self._strategy.num_replicas_in_sync
        return [places[r] for r in (self._replicas() if as_many else places)]

    def _model_of(self, found: Generation) -> str:
        return found.model_for(self._worker, len(found.workers) == self._num_workers)

    # --- write ----------------------------------------------------------------------

    def write(
        self,
        model: keras.Model,
        now: TrainingPosition,
        keep: int,
    ) -> None:
        """Write a backup, and remove older ones when it is complete.

        Args:
            model: Keras model, with the state of its optimizer.
            now: position of the training.
            keep: number of backups that stay, this one among them.

        Raises:
            OSError: if a file cannot be written. With several workers, `RuntimeError`
                on all of them.
        """
        self._number += 1
        average_statistics(model)
        with saving.raise_on_all_workers(self._strategy, self._directory):
            mine = self._write_part(model, now)
        # From here on all parts are on their disks.
        written = self._share(mine, "back up")
        name = self._name(self._number)
        complete = Generation(self._number, name, written)
        with saving.raise_on_all_workers(self._strategy, self._directory):
            if self._writes_for_all():
                write_manifest(self._directory, self._worker, complete)
        consensus.wait_for_workers(self._strategy, "finish the backup")
        self._kept = [*self._kept, self._number][-keep:]
        with saving.raise_on_all_workers(self._strategy, self._directory):
            self._remove(self._kept)

    def _write_part(self, model: keras.Model, now: TrainingPosition) -> dict[str, Any]:
        """Write what this worker has to; return its part of the manifest."""
        number, here = self._number, self._directory
        name = self._name(number)
        part = part_name(number, self._worker)
        whole = model_name(number, self._worker)
        with (
            saving.replacing(here / part) as unfinished,
            worker_parts.writing_part(unfinished, name) as writer,
            consensus_weights.consensus_weights(model, "part"),  # with nobody asked
        ):
            for key, variable in own_variables(model).items():
                copies = self._strategy.experimental_local_results(variable.value)
                writer.put_as(key, np.stack([copy.numpy() for copy in copies]))
            if self._writes_for_all():
                with saving.replacing(here / whole) as path:
                    write_position(model, now, name, path)
            else:
                save_hooks.join_save(model)
        files = [part, whole] if self._writes_for_all() else [part]
        return {
            "replicas": list(self._replicas()),
            "part": part,
            "model": whole if self._writes_for_all() else None,
            "files": {file: describe_generation(here / file) for file in files},
        }

    def delete(self) -> None:
        """Remove all backups; call it when all workers have come to their end."""
        self._remove([])
        here = self._directory
        if self._writes_for_all():
            with contextlib.suppress(OSError):  # there are other files in it
                here.rmdir()

    def _remove(self, kept: list[int]) -> None:
        if self._writes_for_all():
            remove_generation(self._directory, kept, self._number)

    # --- who and where --------------------------------------------------------------

    def _writes_for_all(self) -> bool:
        """Whether this worker writes to its directory what only one has to."""
        return self._worker == 0 or not self._shared

    @property
    def _num_workers(self) -> int:
        several = consensus.is_multi_worker(self._strategy)
        return len(workers.all_names(self._strategy)) if several else 1

    def _replicas(self) -> range:
        """Return the numbers of this process's replicas among all."""
        each = self._strategy.num_replicas_in_sync // self._num_workers
        return range(self._worker * each, (self._worker + 1) * each)

    def _where(self) -> tuple[str, str]:
        """Return how errors name this worker, and its directory."""
        several = consensus.is_multi_worker(self._strategy)
        who = workers.own_name(self._strategy) if several else "this worker"
        return who, str(self._directory)

    def _name(self, number: int) -> str:
        return f"{self._run}-{number}"

    def _share(self, note: dict[str, Any], purpose: str) -> list[dict[str, Any]]:
        """Return the notes of all workers, by index."""
        notes = consensus.exchange_texts(self._strategy, json.dumps(note), purpose)
        return [json.loads(text) for text in notes.values()]


def _number(path: str) -> int:
    return generation_number(pathlib.Path(path))


def _has(where: tuple[str, str], names: Iterable[str]) -> str:
    """Return what a worker has, for an error.

    Args:
        where: name of the worker, and its directory.
        names: names of its backups.
    """
    who, directory = where
    what = " and ".join(map(repr, names))
    return f"{who} has {f'backup {what}' if what else 'no backup'} in {directory!r}"
