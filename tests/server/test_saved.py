"""The server's checkpoint: complete or not at all, and what resumes from it."""

import pathlib

import keras
import numpy as np
import pytest
from full_disk import disk_of
from served_loop import WEIGHTS, Fake, refusal, weights

from tf_dgc.server import checkpoint, process
from tf_dgc.server.checkpoint import ServerCheckpoint
from tf_dgc.server.messages import Kind
from tf_dgc.server.tasks import Task


def adam(rate=0.5):
    return keras.optimizers.Adam(rate)


def of(directory, fake, seconds=60.0, **others):
    return ServerCheckpoint(directory, seconds, fake.lines.append, **others)


def write(directory, fake):
    """Write what there is now."""
    kept = of(directory, fake)
    kept.end(fake.service)  # which is not over
    return kept


@pytest.mark.parametrize("correction", [None, "rate"])
def test_another_server_goes_on_where_the_last_one_was(tmp_path, correction):
    """With the optimizer's state, and the rate that a callback had set."""
    one = Fake(rule=adam(), correction=correction)
    one.join(0)
    one.push(0, 2.0, rate=0.25)
    write(tmp_path, one)
    other = Fake(rule=adam(), correction=correction)
    of(tmp_path, other).restore(other.service)
    assert "resumes from" in other.lines[-1]
    (begun,) = other.join(0)
    assert begun[1]["clock"] == 1
    for value in (1.0, -3.0):
        mine, theirs = other.push(0, value, rate=0.25), one.push(0, value, rate=0.25)
        np.testing.assert_array_equal(weights(*mine), weights(*theirs))


@pytest.mark.parametrize("correction", [None, "rate"])
def test_the_rate_that_workers_come_with_counts(tmp_path, correction):
    """A script that was changed, or a callback before the first step, has set it."""
    one = Fake(rule=adam(), correction=correction)
    one.join(0)
    one.push(0, 2.0)
    write(tmp_path, one)
    other = Fake(rule=adam(0.125), correction=correction)
    of(tmp_path, other).restore(other.service)
    for worker in range(2):
        other.join(worker)
    assert "learning rate 0.125 instead of 0.5, from worker 0" in other.lines
    for rate in (0.125, 0.125, 0.25):
        mine, theirs = (fake.push(0, 1.0, rate=rate) for fake in (other, one))
        np.testing.assert_array_equal(weights(*mine), weights(*theirs))
        assert other.service.model.learning_rate == rate


def test_workers_that_differ_from_the_checkpoint_are_refused(tmp_path):
    one = Fake(rule=adam())
    one.join(0)
    path = write(tmp_path, one).path
    other = Fake(rule=keras.optimizers.SGD(0.5))
    of(tmp_path, other).restore(other.service)
    said = other.join(0)
    assert "optimizer class_name is 'SGD', not 'Adam'" in said
    assert f"as in the checkpoint {path}. Train the model and optimizer of" in said
    (begun,) = other.join(1, handed=one.handed)
    np.testing.assert_array_equal(weights(begun), WEIGHTS)


def test_another_number_of_workers_goes_on_and_in_another_mode(tmp_path):
    one = Fake("sync", number=1)
    one.join(0)
    one.push(0, 2.0)
    write(tmp_path, one)
    other = Fake("ssp", 1, number=3, correction="rate")
    of(tmp_path, other).restore(other.service)
    for worker in range(3):
        other.join(worker)
    # By this correction a push that is not old counts N times as much.
    (told,) = other.push(0, 2.0)
    np.testing.assert_array_equal(weights(told), WEIGHTS - 1 - 3)
    assert told[1]["clock"] == 2
    assert other.push(0, 2.0) == []  # more than a step ahead of the others


def test_a_synchronous_run_waits_for_all_again(tmp_path):
    one = Fake("sync")
    one.join(0)
    one.join(1)
    one.push(0, 2.0)
    one.push(1, 2.0)
    write(tmp_path, one)
    other = Fake("sync")
    of(tmp_path, other).restore(other.service)
    assert other.join(0) == []
    np.testing.assert_array_equal(weights(*other.join(1)), WEIGHTS - 2)


def test_when_it_is_written(tmp_path):
    fake = Fake()
    time = 0.0
    kept = of(tmp_path, fake, 10.0, now=lambda: time)
    kept.write_if_due(fake.service)
    fake.join(0)
    fake.push(0, 2.0)
    for time, exists in [(5.0, False), (9.0, False), (10.0, True)]:  # noqa: B007
        kept.write_if_due(fake.service)
        assert kept.path.exists() is exists
    kept.path.unlink()
    time = 25.0
    kept.write_if_due(fake.service)  # nothing is new
    fake.push(0, 2.0)
    time = 29.0
    kept.write_if_due(fake.service)
    assert not kept.path.exists()
    time = 31.0
    kept.write_if_due(fake.service)
    assert kept.path.exists()


def test_several_servers_write_at_the_same_time_and_not_as_they_end(tmp_path):
    """Whenever they were started; so no file is of much later than another one."""
    time, fakes = 0.0, [Fake(), Fake()]
    both = [
        of(tmp_path, fake, 10.0, shard=(i, 2), now=lambda: time)
        for i, fake in enumerate(fakes)
    ]
    for time, fake, kept in zip([3.0, 8.0], fakes, both, strict=True):  # noqa: B007
        fake.join(0)
        fake.push(0, 2.0)
        kept.write_if_due(fake.service)
        kept.end(fake.service)
    assert not list(tmp_path.iterdir())
    time = 10.0
    for fake, kept in zip(fakes, both, strict=True):
        kept.write_if_due(fake.service)
    assert {p.name for p in tmp_path.iterdir()} == {"server.npz", "server-1.npz"}


def test_it_is_removed_when_all_have_done_their_part(tmp_path):
    fake = Fake(number=1)
    kept = of(tmp_path, fake)
    fake.join(0)
    fake.push(0, 2.0)
    kept.end(fake.service)
    assert kept.path.exists()
    fake.send(0, Kind.LEAVE, number=1)
    kept.end(fake.service)
    assert not kept.path.exists()


def test_nothing_there_is_a_beginning(tmp_path):
    fake = Fake()
    of(tmp_path / "new", fake).restore(fake.service)
    weights(*fake.join(0))


@pytest.mark.parametrize("cut", [0, 10, -10])
def test_a_file_that_is_damaged(tmp_path, cut):
    fake = Fake()
    fake.join(0)
    kept = write(tmp_path, fake)
    kept.path.write_bytes(kept.path.read_bytes()[:cut])
    with pytest.raises(RuntimeError, match="Remove the file to start anew"):
        of(tmp_path, fake).restore(Fake().service)


def test_a_death_while_it_is_written_leaves_the_last_one(tmp_path, monkeypatch):
    fake = Fake()
    fake.join(0)
    kept = write(tmp_path, fake)
    before = kept.path.read_bytes()
    fake.push(0, 2.0)

    def dies(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint.np, "savez", dies)
        patch.setattr(pathlib.Path, "unlink", lambda *_, **__: None)
        write(tmp_path, fake)
    assert kept.path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    of(tmp_path, fake).restore(Fake().service)
    assert list(tmp_path.iterdir()) == [kept.path]


def test_a_full_disk_ends_nothing(tmp_path):
    """The file stays as it was, and is written again in the next period."""
    fake = Fake(number=1)
    time = 0.0
    kept = of(tmp_path, fake, 10.0, now=lambda: time)
    fake.join(0)
    for time in (0.0, 10.0):  # noqa: B007
        kept.write_if_due(fake.service)
    before = kept.path.read_bytes()
    fake.push(0, 2.0)
    time = 20.0
    with disk_of(100):
        kept.write_if_due(fake.service)
        kept.end(fake.service)
    assert "at update 1: [Errno 27] File too large" in fake.lines[-1]
    assert fake.lines[-2] == fake.lines[-1]
    assert kept.path.read_bytes() == before
    time = 25.0
    kept.write_if_due(fake.service)
    assert kept.path.read_bytes() == before
    time = 30.0
    kept.write_if_due(fake.service)
    other = Fake()
    of(tmp_path, other).restore(other.service)
    assert other.lines[-1] == f"resumes from {kept.path}, at update 1"


def test_a_file_that_cannot_be_removed_ends_nothing(tmp_path):
    fake = Fake(number=1)
    fake.join(0)
    fake.send(0, Kind.LEAVE, number=1)
    kept = of(tmp_path, fake)
    kept.path.mkdir()
    kept.end(fake.service)
    assert f"cannot remove {kept.path}, although training is complete" in fake.lines[-1]


def test_a_directory_that_cannot_be_is_told_at_the_beginning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TF_DGC_SERVER_DIR", str(tmp_path / "file" / "sub"))
    with pytest.raises(RuntimeError, match=r"cannot write .*TF_DGC_SERVER_DIR: \[Err"):
        process.serve(Task(("127.0.0.1:1",), 1, None))
    monkeypatch.setenv("TF_DGC_SERVER_DIR", str(tmp_path / "new" / "sub"))
    assert ServerCheckpoint.from_environment(print)
    assert list(tmp_path.rglob("sub/*")) == []


def test_environment(monkeypatch, tmp_path):
    assert ServerCheckpoint.from_environment(print) is None
    monkeypatch.setenv("TF_DGC_SERVER_DIR", str(tmp_path))
    monkeypatch.setenv("TF_DGC_SERVER_SECONDS", "5")
    assert ServerCheckpoint.from_environment(print).path == tmp_path / "server.npz"
    other = ServerCheckpoint.from_environment(print, (2, 3))
    assert other.path == tmp_path / "server-2.npz"
    monkeypatch.setenv("TF_DGC_SERVER_SECONDS", "often")
    with pytest.raises(ValueError, match="TF_DGC_SERVER_SECONDS must be a positive"):
        ServerCheckpoint.from_environment(print)


def test_a_worker_of_before_is_told_to_start_again(tmp_path):
    one = Fake()
    one.join(0)
    write(tmp_path, one)
    other = Fake()
    of(tmp_path, other).restore(other.service)
    (reply,) = other.push(0, 2.0, number=4)
    assert "the server was restarted. Start the worker again" in refusal(reply)
