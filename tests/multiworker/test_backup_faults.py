"""Backups with a full disk, with workers that die, and beside the user's files."""

import itertools
import os
import pathlib
import threading
import warnings
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from full_disk import full_disk_after
from selection import rows
from test_backups import back_up, copies, fit, make_model, names, open_backups, restore

from tf_dgc.multiworker import backup, hdf5, saving
from tf_dgc.multiworker.backup import BackupFolder, TrainingPosition


@pytest.fixture(scope="module")
def alone(strategies):
    model = make_model(strategies[1])
    fit(model, 1)
    return model


# --- a full disk ----------------------------------------------------------------------


@pytest.mark.parametrize("missing", rows([1, 100, 2000, 10**6], [1]))
def test_a_full_disk_keeps_the_previous_backup(alone, tmp_path, missing):
    back_up(alone, tmp_path)
    before = copies(alone), names(tmp_path)
    largest = max(path.stat().st_size for path in tmp_path.iterdir())
    with (
        full_disk_after(max(0, largest - missing)),
        pytest.raises(OSError, match=r"File too large: .*\.unfinished\.\w+\.backup-2"),
    ):
        back_up(alone, tmp_path)
    # Parts without a manifest are ignored, and removed with the next backup.
    assert {*before[1]} == {name for name in names(tmp_path) if "-1." in name}
    restore(alone, tmp_path)
    for values, expected in zip(copies(alone), before[0], strict=True):
        np.testing.assert_array_equal(values, expected)
    back_up(alone, tmp_path)
    assert len(names(tmp_path)) == 3


@pytest.mark.slow
def test_a_full_disk_keeps_the_previous_weights(alone, tmp_path):
    path = tmp_path / "model.weights.h5"
    saving.save_weights(alone, path)
    before = path.read_bytes()
    with (
        full_disk_after(len(before) - 1),
        pytest.raises(OSError, match="File too large"),
    ):
        saving.save_weights(alone, path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["model.weights.h5"]


@pytest.mark.parametrize("size", [0, 500, 3000, 7000, 100_000, 400_000])
def test_hdf5_on_a_full_disk(tmp_path, size):
    """The disk fills up while data or metadata are written, or on closing."""
    path = tmp_path / "file.h5"
    with (
        full_disk_after(size),
        pytest.raises(OSError, match="File too large"),
        hdf5.writing_hdf5(path) as writing,
    ):
        for i in range(50):
            writing.file.create_dataset(str(i), data=np.ones(1000)).attrs["a"] = i
    with hdf5.writing_hdf5(path) as writing:
        writing.file["value"] = 1
    with h5py.File(path, "r") as file:
        assert file["value"][()] == 1


def test_errors_of_hdf5_are_raised_on_all_workers(alone, tmp_path):
    """Errors of h5py become an OSError; others are unchanged."""
    strategy = alone.distribute_strategy
    fail = compile("raise RuntimeError('a reason')", "h5py/h5f.pyx", "exec")
    with (
        pytest.raises(OSError, match=r"could not write .*m\.h5.*a reason"),
        saving.raise_on_all_workers(strategy, tmp_path / "m.h5"),
    ):
        exec(fail)
    with (
        pytest.raises(RuntimeError, match="another"),
        saving.raise_on_all_workers(strategy, tmp_path / "m.h5"),
    ):
        raise RuntimeError("another")


# --- workers with a directory of their own --------------------------------------------


class Killed(Exception):
    """The end of the process of a worker."""


class Barrier:
    """A barrier whose `abort` does not affect workers that all others have met.

    `threading.Barrier.abort` also interrupts those that have not woken up yet.
    """

    def __init__(self, number):
        self.number, self.arrived, self.dead = number, 0, False
        self.changed = threading.Condition()

    def wait(self):
        with self.changed:
            self.arrived += 1
            last = -(-self.arrived // self.number) * self.number
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.arrived >= last or self.dead, timeout=20)
            if self.arrived < last:
                raise threading.BrokenBarrierError

    def abort(self):
        with self.changed:
            self.dead = True
            self.changed.notify_all()


class ThreadWorkers:
    """Workers in threads: stands for the modules `consensus` and `workers`."""

    def __init__(self, number):
        self.number = number
        self.barrier = Barrier(number)
        self.notes = {}

    def strategy(self, index, model):
        local = model.distribute_strategy.experimental_local_results
        return SimpleNamespace(
            worker=index,
            num_replicas_in_sync=self.number,
            experimental_local_results=local,
        )

    def is_multi_worker(self, strategy):
        return True

    def index(self, strategy):
        return strategy.worker

    def own_name(self, strategy):
        return f"worker {strategy.worker}"

    def all_names(self, strategy):
        return [f"worker {i}" for i in range(self.number)]

    def wait_for_workers(self, strategy, purpose):
        self.barrier.wait()

    def exchange_texts(self, strategy, note, purpose):
        self.notes[strategy.worker] = note
        self.barrier.wait()
        notes = {name: self.notes[i] for i, name in enumerate(self.all_names(None))}
        self.barrier.wait()
        return notes

    def run(self, work):
        """Return each worker's result of `work(index)`, or the error it raises."""
        results = {}

        def run(index):
            try:
                results[index] = work(index)
            except Exception as error:
                results[index] = error
                if isinstance(error, Killed):  # waiting workers notice
                    self.barrier.abort()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(self.number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[index] for index in range(self.number)]


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts a number of new workers."""

    one_at_a_time = threading.Lock()  # h5py has state that processes do not share
    write_part = BackupFolder._write_part

    def write_alone(*args):
        with one_at_a_time:
            return write_part(*args)

    monkeypatch.setattr(BackupFolder, "_write_part", write_alone)

    def start(number):
        workers = ThreadWorkers(number)
        monkeypatch.setattr(backup, "consensus", workers)
        monkeypatch.setattr(backup, "workers", workers)
        return workers

    monkeypatch.setattr(saving, "is_one_path", lambda *args: False)
    monkeypatch.setattr(saving.consensus, "is_multi_worker", lambda strategy: False)
    return start


@pytest.fixture(scope="module")
def models(strategies):
    models = [make_model(strategies[1], seed=seed) for seed in range(2)]
    for model in models:
        fit(model, 1)
    return models


def open_backups_of(workers, models, directory):
    return [
        BackupFolder(workers.strategy(i, model), directory / f"w{i}")
        for i, model in enumerate(models)
    ]


def write(workers, backups, models, epoch):
    return workers.run(
        lambda i: backups[i].write(models[i], TrainingPosition(epoch, 0, []), 1)
    )


def find(workers, backups):
    return workers.run(lambda i: backups[i].find())


def read(backups, generations):
    """Return each worker's epoch, and the values of its part."""
    epochs, parts = [], []
    for folder, generation in zip(backups, generations, strict=True):
        with folder.reading(generation) as (_, position, reader):
            epochs.append(position.epoch)
            parts.append(reader.take(np.array([0]))[folder._worker])
    return epochs, parts


@pytest.mark.parametrize(
    ("num_files", "dying"), rows(itertools.product(range(4), range(2)), [(2, 1)])
)
def test_a_death_leads_all_to_the_last_backup_of_all(
    start, models, tmp_path, monkeypatch, dying, num_files
):
    """A worker dies before a certain file that it writes, or before a removal."""
    workers = start(2)
    backups = open_backups_of(workers, models, tmp_path)
    assert find(workers, backups) == [None, None]
    assert write(workers, backups, models, 1) == [None, None]
    remaining = [num_files]

    def replace(source, target, stock=os.replace):
        if pathlib.Path(target).parent.name == f"w{dying}":
            if not remaining[0]:
                raise Killed
            remaining[0] -= 1
        stock(source, target)

    def unlink(path, missing_ok=False, stock=pathlib.Path.unlink):
        if path.parent.name == f"w{dying}" and "unfinished" not in path.name:
            raise Killed
        stock(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr(pathlib.Path, "unlink", unlink)
        assert isinstance(write(workers, backups, models, 2)[dying], Killed)

    workers = start(2)
    backups = open_backups_of(workers, models, tmp_path)
    generations = find(workers, backups)
    last = 2 if num_files == 3 else 1
    assert [generation.number for generation in generations] == [last, last]
    epochs, parts = read(backups, generations)
    assert epochs == [last, last]
    for model, value in zip(models, parts, strict=True):
        states = [v.gather()[0] for v in model.optimizer.residual]
        states += [v.gather()[0] for v in model.optimizer.velocity]
        assert any(np.array_equal(value, state) for state in states)
    assert write(workers, backups, models, 3) == [None, None]
    one, other = (
        {name.split(".")[0] for name in names(tmp_path / f"w{i}")} for i in range(2)
    )
    # If no worker wrote a file of the second backup, the third has its number.
    assert one == other
    assert one in ([{"backup-3"}] if num_files else [{"backup-2"}, {"backup-3"}])


def test_workers_without_a_backup_are_named(start, models, tmp_path):
    workers = start(2)
    backups = open_backups_of(workers, models, tmp_path)
    find(workers, backups)
    write(workers, backups, models, 1)
    name = backups[0]._name(1)
    workers = start(3)
    backups = open_backups_of(workers, [*models, models[0]], tmp_path)
    for error in find(workers, backups):
        assert isinstance(error, ValueError)
        assert f"worker 1 has backup {name!r} in " in str(error)
        assert f"worker 2 has no backup in {str(tmp_path / 'w2')!r}" in str(error)


# --- files of the user, and of previous backups ---------------------------------------


def test_files_of_the_user_stay(alone, tmp_path):
    user_files = {
        ".unfinished.backup-1.zip",
        "backup-1.zip",
        "backup-2.part-0.h5.bak",
        "backup-2.manifest-0.json.txt",
        "backup-2.part-x.h5",
        "backup-2024.tar.gz",
        "my-backup-1.part-0.h5",
    }
    for name in user_files:
        (tmp_path / name).write_text("of the user")
    for number in range(1, 5):
        back_up(alone, tmp_path)
        written = {*names(tmp_path)} - user_files
        assert {name.split(".")[0] for name in written} == {f"backup-{number}"}
        assert user_files <= {*names(tmp_path)}


@pytest.mark.slow
def test_only_newer_backups_cause_a_warning(alone, tmp_path):
    for _ in range(3):
        back_up(alone, tmp_path, keep=3)
    backups, _ = open_backups(alone, tmp_path)
    backups._numbers = [1, 2, 3]
    backups.write(alone, TrainingPosition(1, 0, []), 4)
    (tmp_path / "backup-1.manifest-0.json").write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_backups(alone, tmp_path)[1].number == 4
    (tmp_path / "backup-4.part-0.h5").unlink()
    with pytest.warns(UserWarning, match=r"Continuing from backup 3") as caught:
        open_backups(alone, tmp_path)
    (message,) = {str(warning.message) for warning in caught}
    assert "backup-4.part-0.h5" in message
    assert "backup-1" not in message
