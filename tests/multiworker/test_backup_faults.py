"""Backups where a disk is full, where workers die, and where files are not theirs."""

import itertools
import os
import pathlib
import threading
import warnings
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from full_disk import disk_of
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
def test_a_full_disk_leaves_the_backup_before(alone, tmp_path, missing):
    back_up(alone, tmp_path)
    before = copies(alone), names(tmp_path)
    largest = max(path.stat().st_size for path in tmp_path.iterdir())
    with (
        disk_of(max(0, largest - missing)),
        pytest.raises(OSError, match=r"File too large: .*\.unfinished\.\w+\.backup-2"),
    ):
        back_up(alone, tmp_path)
    # Parts without a manifest count for nothing, and go with the next backup.
    assert {*before[1]} == {name for name in names(tmp_path) if "-1." in name}
    restore(alone, tmp_path)
    for found, other in zip(copies(alone), before[0], strict=True):
        np.testing.assert_array_equal(found, other)
    back_up(alone, tmp_path)
    assert len(names(tmp_path)) == 3


@pytest.mark.slow
def test_a_full_disk_leaves_the_weights_before(alone, tmp_path):
    path = tmp_path / "model.weights.h5"
    saving.save_weights(alone, path)
    before = path.read_bytes()
    with disk_of(len(before) - 1), pytest.raises(OSError, match="File too large"):
        saving.save_weights(alone, path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["model.weights.h5"]


@pytest.mark.parametrize("size", [0, 500, 3000, 7000, 100_000, 400_000])
def test_hdf5_on_a_full_disk(tmp_path, size):
    """At any place: data, or what describes it, when it is written or in the end."""
    path = tmp_path / "file.h5"
    with (
        disk_of(size),
        pytest.raises(OSError, match="File too large"),
        hdf5.writing_hdf5(path) as writing,
    ):
        for i in range(50):
            writing.file.create_dataset(str(i), data=np.ones(1000)).attrs["a"] = i
    with hdf5.writing_hdf5(path) as writing:
        writing.file["value"] = 1
    with h5py.File(path, "r") as file:
        assert file["value"][()] == 1


def test_errors_of_hdf5_are_told_to_all(alone, tmp_path):
    """As far as h5py raises one where Keras opens the file; others stay as they are."""
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


class Meetings:
    """A barrier where a death ends no meeting to which all have come.

    One of `threading` that is aborted also ends those who have not woken yet.
    """

    def __init__(self, number):
        self.number, self.came, self.dead = number, 0, False
        self.changed = threading.Condition()

    def wait(self):
        with self.changed:
            self.came += 1
            last = -(-self.came // self.number) * self.number
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.came >= last or self.dead, timeout=20)
            if self.came < last:
                raise threading.BrokenBarrierError

    def abort(self):
        with self.changed:
            self.dead = True
            self.changed.notify_all()


class Together:
    """Workers in threads: what `Backups` asks of the others, without a cluster.

    Stands for the modules `consensus` and `workers`.
    """

    def __init__(self, number):
        self.number = number
        self.barrier = Meetings(number)
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
        """Return what `work(index)` of every worker returns or raises."""
        found = {}

        def run(index):
            try:
                found[index] = work(index)
            except Exception as error:
                found[index] = error
                if isinstance(error, Killed):  # of whom those who wait are told
                    self.barrier.abort()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(self.number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[index] for index in range(self.number)]


@pytest.fixture
def start(monkeypatch):
    """Return what starts a number of workers anew."""

    one_at_a_time = threading.Lock()  # as no two processes share what h5py keeps
    write_part = BackupFolder._write_part

    def write_alone(*args):
        with one_at_a_time:
            return write_part(*args)

    monkeypatch.setattr(BackupFolder, "_write_part", write_alone)

    def start(number):
        together = Together(number)
        monkeypatch.setattr(backup, "consensus", together)
        monkeypatch.setattr(backup, "workers", together)
        return together

    monkeypatch.setattr(saving, "is_one_path", lambda *args: False)
    monkeypatch.setattr(saving.consensus, "is_multi_worker", lambda strategy: False)
    return start


@pytest.fixture(scope="module")
def two(strategies):
    models = [make_model(strategies[1], seed=seed) for seed in range(2)]
    for model in models:
        fit(model, 1)
    return models


def of_each(together, models, directory):
    return [
        BackupFolder(together.strategy(i, model), directory / f"w{i}")
        for i, model in enumerate(models)
    ]


def write(together, backups, models, epoch):
    return together.run(
        lambda i: backups[i].write(models[i], TrainingPosition(epoch, 0, []), 1)
    )


def find(together, backups):
    return together.run(lambda i: backups[i].find())


def read(backups, found):
    """Return the epoch of every worker, and its part's bytes by name."""
    epochs, kept = [], []
    for each, generation in zip(backups, found, strict=True):
        with each.reading(generation) as (_, where, reader):
            epochs.append(where.epoch)
            kept.append(reader.take(np.array([0]))[each._worker])
    return epochs, kept


@pytest.mark.parametrize(
    ("done", "dying"), rows(itertools.product(range(4), range(2)), [(2, 1)])
)
def test_a_death_leads_all_to_the_last_backup_of_all(
    start, two, tmp_path, monkeypatch, dying, done
):
    """One dies before its part, its model's file, its manifest, or what it removes."""
    together = start(2)
    backups = of_each(together, two, tmp_path)
    assert find(together, backups) == [None, None]
    assert write(together, backups, two, 1) == [None, None]
    left = [done]

    def replace(source, target, stock=os.replace):
        if pathlib.Path(target).parent.name == f"w{dying}":
            if not left[0]:
                raise Killed
            left[0] -= 1
        stock(source, target)

    def unlink(path, missing_ok=False, stock=pathlib.Path.unlink):
        if path.parent.name == f"w{dying}" and "unfinished" not in path.name:
            raise Killed
        stock(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr(pathlib.Path, "unlink", unlink)
        assert isinstance(write(together, backups, two, 2)[dying], Killed)

    together = start(2)
    backups = of_each(together, two, tmp_path)
    found = find(together, backups)
    last = 2 if done == 3 else 1
    assert [generation.number for generation in found] == [last, last]
    epochs, kept = read(backups, found)
    assert epochs == [last, last]
    for model, value in zip(two, kept, strict=True):
        with_state = [v.gather()[0] for v in model.optimizer.residual]
        with_state += [v.gather()[0] for v in model.optimizer.velocity]
        assert any(np.array_equal(value, state) for state in with_state)
    assert write(together, backups, two, 3) == [None, None]
    one, other = (
        {name.split(".")[0] for name in names(tmp_path / f"w{i}")} for i in range(2)
    )
    # Where nothing of the second was written, by the other one either, this is it.
    assert one == other
    assert one in ([{"backup-3"}] if done else [{"backup-2"}, {"backup-3"}])


def test_workers_without_a_backup_are_named(start, two, tmp_path):
    together = start(2)
    backups = of_each(together, two, tmp_path)
    find(together, backups)
    write(together, backups, two, 1)
    name = backups[0]._name(1)
    together = start(3)
    for error in find(together, of_each(together, [*two, two[0]], tmp_path)):
        assert isinstance(error, ValueError)
        assert f"worker 1 has backup {name!r} in " in str(error)
        assert f"worker 2 has no backup in {str(tmp_path / 'w2')!r}" in str(error)


# --- files of the user's own, and of backups before -----------------------------------


def test_files_of_the_user_stay(alone, tmp_path):
    own = {
        ".unfinished.backup-1.zip",
        "backup-1.zip",
        "backup-2.part-0.h5.bak",
        "backup-2.manifest-0.json.txt",
        "backup-2.part-x.h5",
        "backup-2024.tar.gz",
        "my-backup-1.part-0.h5",
    }
    for name in own:
        (tmp_path / name).write_text("of the user")
    for number in range(1, 5):
        back_up(alone, tmp_path)
        written = {*names(tmp_path)} - own
        assert {name.split(".")[0] for name in written} == {f"backup-{number}"}
        assert own <= {*names(tmp_path)}


@pytest.mark.slow
def test_a_warning_is_of_newer_backups_alone(alone, tmp_path):
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
    (told,) = {str(warning.message) for warning in caught}
    assert "backup-4.part-0.h5" in told
    assert "backup-1" not in told
