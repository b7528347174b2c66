"""Backups: a part of each worker's state, the weights, and a manifest of all files.

Nothing of a model's size travels between workers. If all workers see one directory, the
first worker writes the weights, which are equal on all; otherwise each does.

The files of backup 3, which is a generation: `backup-3.part-0.h5` of worker 0, and so
on; weights and other state that is equal, in `backup-3.model-0.weights.h5`; and
`backup-3.manifest-0.json`, which lists all of them with their checksums. Files that no
manifest lists are ignored.
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

# Only files that this module writes; the directory may contain files of the user.
_NAME = re.compile(
    rf"(?:{saving.UNFINISHED})?backup-(\d+)\."
    r"(?:part-\d+\.h5|model-\d+\.weights\.h5|manifest-\d+\.json)"
)
_MANIFEST = re.compile(r"backup-(\d+)\.manifest-\d+\.json")
_CHUNK_BYTES = 2**24
_GROUP = "tf_dgc_backup"
_MODEL = "tf_dgc_model"
_MAX_LISTED = 8  # variables that differ; more are counted
_WHAT_TO_DO = (
    "Each worker reads its own part of a backup and the weights; if the number of "
    "workers has changed, it reads the parts of all. Restore the files listed here, "
    "for example from a copy of the directory. If every worker wrote to a directory of "
    "its own, start as many workers as before, each on the same machine, or put all "
    "files into one directory that all workers can see. To start anew, delete the "
    "backups."
)


class Generation(NamedTuple):
    """The content of a manifest."""

    number: int
    name: str  # name that no other backup has
    workers: list[dict[str, Any]]  # each with `replicas`, `part`, `model`, `files`

    @property
    def num_replicas(self) -> int:
        """Number of replicas that wrote."""
        return sum(len(worker["replicas"]) for worker in self.workers)

    def rows(self) -> dict[int, tuple[str, int]]:
        """Return the part, and the row in it, of every replica."""
        return {
            replica: (worker["part"], row)
            for worker in self.workers
            for row, replica in enumerate(worker["replicas"])
        }


class TrainingPosition(NamedTuple):
    """Where training was."""

    epoch: int  # number of the epoch to continue with, from 0
    batches: int  # number of this epoch's batches that are done
    metrics: list[Any]  # values of the model's metric variables, if batches are done


class BackupFolder:
    """The backups in a local directory; all workers create it and call its methods."""

    def __init__(self, strategy: tf.distribute.Strategy, directory: pathlib.Path):
        self._strategy, self._directory = strategy, directory
        multi_worker = consensus.is_multi_worker(strategy)
        self._worker = workers.index(strategy) if multi_worker else 0
        self._num_workers = len(workers.all_names(strategy)) if multi_worker else 1
        self._worker_name = (
            workers.own_name(strategy) if multi_worker else "this worker"
        )
        self._shared = not multi_worker or saving.is_one_path(
            strategy, directory / "backup"
        )
        self._run_name = ""  # random, equal on all workers
        self._last_number = 0
        self._numbers: list[int] = []  # of the backups that are kept

    # Find and read

    def find(self) -> Generation | None:
        """Return the last backup that all workers can read; None if there is none."""
        # Raises `ValueError` on all workers, if there are some and none can be read.
        generations, unreadable = find_generations(self._directory)
        reports = self._exchange(
            {
                "worker": self._worker_name,
                "directory": str(self._directory),
                "names": {str(number): g.name for number, g in generations.items()},
                "unreadable": unreadable,
                # Of any file, complete or not.
                "last": max(map(generation_number, _files(self._directory)), default=0),
                "random": uuid.uuid4().hex,
            },
            "find the last backup",
        )
        self._run_name = reports[0]["random"]
        self._last_number = max(report["last"] for report in reports)
        problems = {k: v for report in reports for k, v in report["unreadable"].items()}
        for number in sorted(generations, reverse=True):
            generation = generations[number]
            if any(r["names"].get(str(number)) != generation.name for r in reports):
                continue
            if new_problems := self._problems(generation):
                problems |= new_problems
                continue
            newer = {
                path: problem
                for path, problem in problems.items()
                if generation_number(pathlib.Path(path)) > number
            }
            if newer:
                text = f"Continuing from backup {number}, as newer ones cannot be read"
                warnings.warn(f"{text}: {newer}", stacklevel=3)
            self._numbers = [number]
            return generation
        if problems or any(report["names"] for report in reports):
            reasons = [f"{path!r}: {text!r}" for path, text in problems.items()]
            reasons = reasons or list(map(_describe_report, reports))
            raise ValueError(
                f"No backup can be read by all workers. {_WHAT_TO_DO} "
                f"Received: backup_dir={str(self._directory)!r}; {'; '.join(reasons)}"
            )
        return None

    def _problems(self, generation: Generation) -> dict[str, str]:
        names = [self._model_file(generation)]
        names += [part for part, _ in self._needed_rows(generation)]
        problems = {
            str(self._directory / name): problem
            for name in dict.fromkeys(names)
            if (problem := file_problem(self._directory, generation, name))
        }
        reports = self._exchange(problems, "look at the last backup")
        return {path: text for report in reports for path, text in report.items()}

    @contextlib.contextmanager
    def reading(
        self, generation: Generation
    ) -> Iterator[tuple[pathlib.Path, TrainingPosition, worker_parts.PartReader]]:
        """Yield the weights file of a backup, its position, and the reader of parts."""
        path = self.weights_file(generation)
        needed = set(self._needed_rows(generation))
        rows = {
            replica: (self._directory / part, row)
            for replica, (part, row) in generation.rows().items()
            if (part, row) in needed
        }
        with worker_parts.reading_part(
            rows,
            self._replicas(),
            self._strategy.num_replicas_in_sync,
            generation.num_replicas,
        ) as reader:
            yield path, load_position(path), reader

    def weights_file(self, generation: Generation) -> pathlib.Path:
        """Return the file of a backup with the weights that this worker reads."""
        return self._directory / self._model_file(generation)

    def _needed_rows(self, generation: Generation) -> list[tuple[str, int]]:
        rows = generation.rows()
        if generation.num_replicas == self._strategy.num_replicas_in_sync:
            return [rows[replica] for replica in self._replicas()]
        return list(rows.values())

    def _model_file(self, generation: Generation) -> str:
        files = [worker["model"] for worker in generation.workers]
        own_file = files[self._worker] if len(files) == self._num_workers else None
        return own_file or next(filter(None, files))

    # Write

    def write(self, model: keras.Model, position: TrainingPosition, keep: int) -> None:
        """Write a backup; then remove all but `keep`, counting this one."""
        self._last_number += 1
        average_statistics(model)
        with saving.raise_on_all_workers(self._strategy, self._directory):
            entry = self._write_part(model, position)
        # From here on all parts are on their disks.
        entries = self._exchange(entry, "back up")
        name = self._name(self._last_number)
        generation = Generation(self._last_number, name, entries)
        with saving.raise_on_all_workers(self._strategy, self._directory):
            if self._writes_shared_files:
                write_manifest(self._directory, self._worker, generation)
        consensus.wait_for_workers(self._strategy, "finish the backup")
        self._numbers = [*self._numbers, self._last_number][-keep:]
        with saving.raise_on_all_workers(self._strategy, self._directory):
            self._remove_all_but(self._numbers)

    def _write_part(
        self, model: keras.Model, position: TrainingPosition
    ) -> dict[str, Any]:
        number, directory = self._last_number, self._directory
        name = self._name(number)
        part = part_name(number, self._worker)
        model_file = f"backup-{number}.model-{self._worker}.weights.h5"
        with (
            saving.replacing(directory / part) as unfinished,
            worker_parts.writing_part(unfinished, name) as writer,
            consensus_weights.consensus_weights(model, "part"),
        ):
            for key, variable in per_worker_variables(model).items():
                copies = self._strategy.experimental_local_results(variable.value)
                writer.put_as(key, np.stack([copy.numpy() for copy in copies]))
            if self._writes_shared_files:
                with saving.replacing(directory / model_file) as path:
                    write_position(model, position, name, path)
            else:
                save_hooks.join_save(model)
        files = [part, model_file] if self._writes_shared_files else [part]
        return {
            "replicas": list(self._replicas()),
            "part": part,
            "model": model_file if self._writes_shared_files else None,
            "files": {file: describe_file(directory / file) for file in files},
        }

    def delete(self) -> None:
        """Remove all backups; call it when training has ended on all workers."""
        self._remove_all_but([])
        if self._writes_shared_files:
            with contextlib.suppress(OSError):  # there are other files in it
                self._directory.rmdir()

    def _remove_all_but(self, numbers: list[int]) -> None:
        if self._writes_shared_files:
            remove_generations(self._directory, numbers, self._last_number)

    @property
    def _writes_shared_files(self) -> bool:
        return self._worker == 0 or not self._shared

    def _replicas(self) -> range:
        per_worker = self._strategy.num_replicas_in_sync // self._num_workers
        return range(self._worker * per_worker, (self._worker + 1) * per_worker)

    def _name(self, number: int) -> str:
        return f"{self._run_name}-{number}"

    def _exchange(self, report: dict[str, Any], purpose: str) -> list[dict[str, Any]]:
        """Return the reports of all workers, by index."""
        texts = consensus.exchange_texts(self._strategy, json.dumps(report), purpose)
        return [json.loads(text) for text in texts.values()]


def _describe_report(report: dict[str, Any]) -> str:
    names = " and ".join(map(repr, report["names"].values()))
    backups = f"backup {names}" if names else "no backup"
    return f"{report['worker']} has {backups} in {report['directory']!r}"


# Generations and their files


def part_name(number: int, worker: int) -> str:
    """Return the name of a worker's part."""
    return f"backup-{number}.part-{worker}.h5"


def describe_file(path: pathlib.Path) -> dict[str, int]:
    """Return a file's entry in a manifest: its size and checksum."""
    return {"bytes": path.stat().st_size, "crc32": _checksum(path)}


def write_manifest(
    directory: pathlib.Path, worker: int, generation: Generation
) -> None:
    """Write the manifest of one worker, complete or not at all."""
    text = json.dumps(generation._asdict(), sort_keys=True)
    path = directory / f"backup-{generation.number}.manifest-{worker}.json"
    with saving.replacing(path) as unfinished:
        content = {"manifest": text, "crc32": zlib.crc32(text.encode())}
        unfinished.write_text(json.dumps(content))


def generation_number(path: pathlib.Path) -> int:
    """Return the number of the backup that a file belongs to; 0 if to none."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def find_generations(
    directory: pathlib.Path,
) -> tuple[dict[int, Generation], dict[str, str]]:
    """Return the generations by number, and the problem of each unreadable manifest."""
    generations: dict[int, Generation] = {}
    unreadable: dict[str, str] = {}
    for path in sorted(_files(directory)):
        if _MANIFEST.fullmatch(path.name):
            try:
                generation = _read_manifest(path)
                generations[generation.number] = generation
            except (OSError, ValueError, KeyError, TypeError) as error:
                unreadable[str(path)] = f"is damaged: {error}"
    return generations, unreadable


def file_problem(
    directory: pathlib.Path, generation: Generation, name: str
) -> str | None:
    """Return what is wrong with a file of a generation, None if nothing is."""
    path = directory / name
    expected = next(w["files"][name] for w in generation.workers if name in w["files"])
    if not path.exists():
        return "is not there"
    try:
        if describe_file(path) == expected:
            return None
        # HDF5's library may end the process over a damaged file: look at the bytes.
        content = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error}"
    names = {name.decode() for name in re.findall(rb"[0-9a-f]{32}-\d+", content)}
    if names and generation.name not in names:
        return f"belongs to another backup, {min(names)!r}"
    return "is damaged: its checksum differs from that in the manifest"


def remove_generations(directory: pathlib.Path, keep: Iterable[int], last: int) -> None:
    """Remove all files, complete or not, of generations 0 to `last` but `keep`."""
    # Manifests go first: what is left after an interruption is ignored.
    numbers = set(range(last + 1)) - set(keep)
    old = [path for path in _files(directory) if generation_number(path) in numbers]
    for path in sorted(old, key=lambda p: not _MANIFEST.fullmatch(p.name)):
        path.unlink(missing_ok=True)


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    if not directory.exists():
        return []
    return [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]


def _read_manifest(path: pathlib.Path) -> Generation:
    content = json.loads(path.read_text())
    text = content["manifest"]
    if zlib.crc32(text.encode()) != content["crc32"]:
        raise ValueError("its checksum is wrong")
    generation = Generation(**json.loads(text))
    if generation.number != generation_number(path):
        raise ValueError(f"it describes backup {generation.number}")
    return generation


def _checksum(path: pathlib.Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while content := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(content, checksum)
    return checksum


# The file with the weights and the position of the training


def read_position(model: keras.Model, epoch: int, batches: int) -> TrainingPosition:
    """Return the current position of `model`; call it on every worker."""
    metrics = model.metrics_variables if batches else []
    return TrainingPosition(epoch, batches, [v.numpy() for v in metrics])


def write_position(
    model: keras.Model, position: TrainingPosition, name: str, path: pathlib.Path
) -> None:
    """Write a model's weights, as Keras does, and the position of its training."""
    with hdf5.writing_hdf5(path) as writing:
        writing.file.attrs["backup"] = name
        save_hooks.save_weights(model, writing.file, writing.check)
        group = writing.file.create_group(_GROUP)
        group.attrs["epoch"] = position.epoch
        group.attrs["batches"] = position.batches
        for i, value in enumerate(position.metrics):
            group.create_dataset(str(i), data=value)
        # A dataset, as HDF5's attributes hold no more than 64 kB.
        text = json.dumps(describe_model(model)).encode()
        writing.file.create_dataset(_MODEL, data=np.frombuffer(text, np.uint8))
        writing.check()


def load_position(path: pathlib.Path) -> TrainingPosition:
    """Return the position that `write_position` wrote."""
    with h5py.File(path, "r") as file:
        group = file[_GROUP]
        metrics = [group[str(i)][()] for i in range(len(group))]
        epoch, batches = (int(group.attrs[name]) for name in ("epoch", "batches"))
    return TrainingPosition(epoch, batches, metrics)


def per_worker_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Return other variables that differ between workers: seeds, the loss scale."""
    seeds = [v for v in model.variables if v.name == "seed_generator_state"]
    variables = {f"stream {i}": v for i, v in enumerate(seeds)}
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.built:
        variables["loss scale"] = optimizer.dynamic_scale
        variables["steps of loss scale"] = optimizer.step_counter
    return variables


# Descriptions of models


def describe_model(model: keras.Model) -> dict[str, Any]:
    """Return path, shape and dtype of a model's weights, and its optimizer."""
    # Seeds and metrics are left out: a model creates them while it trains.
    optimizer = model.optimizer
    text = repr(optimizer)
    if " object at 0x" in text:
        text = type(optimizer).__name__
    weights = [[v.path, list(v.shape), v.dtype] for v in model.weights]
    return {"weights": weights, "optimizer": text}


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """Return the description of the saved model; empty for a file without one."""
    with h5py.File(path, "r") as file:
        if _MODEL not in file:
            return {}
        return json.loads(file[_MODEL][()].tobytes())


def model_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return how a model differs from the saved one, a line for each weight."""
    # Keras numbers layers without a name, so two models match if their shapes and
    # dtypes match, in order or by path. An empty `saved` is not compared.
    if not saved:
        return []
    before, now = saved["weights"], current["weights"]
    specs_before = {path: spec for path, *spec in before}
    specs_now = {path: spec for path, *spec in now}
    in_order = [spec for _, *spec in before] == [spec for _, *spec in now]
    if in_order or specs_before == specs_now:
        return []
    if len(before) == len(now):
        lines = [
            _difference(path, old, new)
            for (path, *old), (_, *new) in zip(before, now, strict=True)
            if old != new
        ]
    else:
        lines = [f"{len(before)} weights in the backup, {len(now)} in this model"]
        for path, spec in {**specs_before, **specs_now}.items():
            old, new = specs_before.get(path), specs_now.get(path)
            if old is None or new is None:
                where = "the backup" if new is None else "this model"
                lines.append(f"{path}: {_format_spec(spec)} in {where} alone")
            elif old != new:
                lines.append(_difference(path, old, new))
    if len(lines) > _MAX_LISTED:
        lines = [*lines[:_MAX_LISTED], f"and {len(lines) - _MAX_LISTED} more"]
    return lines


def _difference(path: str, old: Sequence[Any], new: Sequence[Any]) -> str:
    return (
        f"{path}: {_format_spec(old)} in the backup, {_format_spec(new)} in this model"
    )


def _format_spec(spec: Sequence[Any]) -> str:
    shape, dtype = spec
    return f"{dtype} {tuple(shape)}"
