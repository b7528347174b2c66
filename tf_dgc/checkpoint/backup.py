"""Backups: what training would go on from, a part of each worker and a manifest.

Nothing of a model's size travels between workers. Where all see one directory, the
first worker writes what all have alike; where each has its own, all of them do.
"""

import contextlib
import json
import pathlib
import uuid
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import stores
from tf_dgc.checkpoint import generations, parts, position, saving
from tf_dgc.checkpoint.generations import Generation
from tf_dgc.checkpoint.position import Position
from tf_dgc.cluster import meeting, workers
from tf_dgc.training import agreed
from tf_dgc.training.statistics import average_statistics

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


class Backups:
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
        several = meeting.is_multi_worker(strategy)
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
        mine, unreadable = generations.find(self._directory)
        note = {
            "where": self._where(),
            "names": {str(number): g.name for number, g in mine.items()},
            "unreadable": unreadable,
            "last": generations.last_number(self._directory),
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
            if (wrong := generations.problem(here, found, name))
        }
        notes = self._share(mine, "look at the last backup")
        return {path: wrong for note in notes for path, wrong in note.items()}

    @contextlib.contextmanager
    def reading(
        self, found: Generation
    ) -> Iterator[tuple[pathlib.Path, Position, parts.Reader]]:
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
        with parts.reading(asked, *sizes) as reader:
            yield path, position.read(path), reader

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
        now: Position,
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
        with saving.told_to_all(self._strategy, self._directory):
            mine = self._write_part(model, now)
        # From here on all parts are on their disks.
        written = self._share(mine, "back up")
        name = self._name(self._number)
        complete = Generation(self._number, name, written)
        with saving.told_to_all(self._strategy, self._directory):
            if self._writes_for_all():
                generations.write_manifest(self._directory, self._worker, complete)
        meeting.rendezvous(self._strategy, "finish the backup")
        self._kept = [*self._kept, self._number][-keep:]
        with saving.told_to_all(self._strategy, self._directory):
            self._remove(self._kept)

    def _write_part(self, model: keras.Model, now: Position) -> dict[str, Any]:
        """Write what this worker has to; return its part of the manifest."""
        number, here = self._number, self._directory
        name = self._name(number)
        part = generations.part_name(number, self._worker)
        whole = generations.model_name(number, self._worker)
        with (
            saving.replacing(here / part) as unfinished,
            parts.writing(unfinished, name) as writer,
            agreed.weights(model, "part"),  # with nobody asked
        ):
            for key, variable in own_variables(model).items():
                copies = self._strategy.experimental_local_results(variable.value)
                writer.put_as(key, np.stack([copy.numpy() for copy in copies]))
            if self._writes_for_all():
                with saving.replacing(here / whole) as path:
                    position.write(model, now, name, path)
            else:
                stores.take_part_in_saving(model)
        files = [part, whole] if self._writes_for_all() else [part]
        return {
            "replicas": list(self._replicas()),
            "part": part,
            "model": whole if self._writes_for_all() else None,
            "files": {file: generations.describe(here / file) for file in files},
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
            generations.remove(self._directory, kept, self._number)

    # --- who and where --------------------------------------------------------------

    def _writes_for_all(self) -> bool:
        """Whether this worker writes to its directory what only one has to."""
        return self._worker == 0 or not self._shared

    @property
    def _num_workers(self) -> int:
        several = meeting.is_multi_worker(self._strategy)
        return len(workers.everyone(self._strategy)) if several else 1

    def _replicas(self) -> range:
        """Return the numbers of this process's replicas among all."""
        each = self._strategy.num_replicas_in_sync // self._num_workers
        return range(self._worker * each, (self._worker + 1) * each)

    def _where(self) -> tuple[str, str]:
        """Return how errors name this worker, and its directory."""
        several = meeting.is_multi_worker(self._strategy)
        who = workers.me(self._strategy) if several else "this worker"
        return who, str(self._directory)

    def _name(self, number: int) -> str:
        return f"{self._run}-{number}"

    def _share(self, note: dict[str, Any], purpose: str) -> list[dict[str, Any]]:
        """Return the notes of all workers, by index."""
        notes = meeting.share_notes(self._strategy, json.dumps(note), purpose)
        return [json.loads(text) for text in notes.values()]


def _number(path: str) -> int:
    return generations.number_of(pathlib.Path(path))


def _has(where: tuple[str, str], names: Iterable[str]) -> str:
    """Return what a worker has, for an error.

    Args:
        where: name of the worker, and its directory.
        names: names of its backups.
    """
    who, directory = where
    what = " and ".join(map(repr, names))
    return f"{who} has {f'backup {what}' if what else 'no backup'} in {directory!r}"
