"""Checkpoints of the server: complete or absent, and what resumes from them."""

import pathlib

import keras
import numpy as np
import pytest
from full_disk import full_disk_after
from served_loop import WEIGHTS, Fake, refusal, weights

from tf_dgc.server import checkpoint as checkpoint_module
from tf_dgc.server import process
from tf_dgc.server.checkpoint import ServerCheckpoint
from tf_dgc.server.messages import Kind
from tf_dgc.server.tasks import Task


def adam(rate=0.5):
    return keras.optimizers.Adam(rate)


def make_checkpoint(directory, fake, seconds=60.0, **settings):
    return ServerCheckpoint(directory, seconds, fake.lines.append, **settings)


def write_checkpoint(directory, fake):
    """Write a checkpoint of the current state."""
    checkpoint = make_checkpoint(directory, fake)
    checkpoint.end(fake.service)  # the run is not over
    return checkpoint


@pytest.mark.parametrize("correction", [None, "rate"])
def test_restarted_server_resumes(tmp_path, correction):
    """With the optimizer's state, and the learning rate that a callback had set."""
    one = Fake(rule=adam(), correction=correction)
    one.join(0)
    one.push(0, 2.0, rate=0.25)
    write_checkpoint(tmp_path, one)
    other = Fake(rule=adam(), correction=correction)
    make_checkpoint(tmp_path, other).restore(other.service)
    assert "resumes from" in other.lines[-1]
    (reply,) = other.join(0)
    assert reply[1]["clock"] == 1
    for value in (1.0, -3.0):
        actual = other.push(0, value, rate=0.25)
        expected = one.push(0, value, rate=0.25)
        np.testing.assert_array_equal(weights(*actual), weights(*expected))


@pytest.mark.parametrize("correction", [None, "rate"])
def test_learning_rate_of_joining_workers_is_used(tmp_path, correction):
    """A changed script, or a callback before the first step, may have set it."""
    one = Fake(rule=adam(), correction=correction)
    one.join(0)
    one.push(0, 2.0)
    write_checkpoint(tmp_path, one)
    other = Fake(rule=adam(0.125), correction=correction)
    make_checkpoint(tmp_path, other).restore(other.service)
    for worker in range(2):
        other.join(worker)
    assert "learning rate 0.125 instead of 0.5, from worker 0" in other.lines
    for rate in (0.125, 0.125, 0.25):
        actual, expected = (fake.push(0, 1.0, rate=rate) for fake in (other, one))
        np.testing.assert_array_equal(weights(*actual), weights(*expected))
        assert other.service.model.learning_rate == rate


def test_workers_that_differ_from_the_checkpoint_are_refused(tmp_path):
    one = Fake(rule=adam())
    one.join(0)
    path = write_checkpoint(tmp_path, one).path
    other = Fake(rule=keras.optimizers.SGD(0.5))
    make_checkpoint(tmp_path, other).restore(other.service)
    error = other.join(0)
    assert "optimizer class_name is 'SGD', not 'Adam'" in error
    assert f"as in the checkpoint {path}. Train the model and optimizer of" in error
    (reply,) = other.join(1, handed=one.handed)
    np.testing.assert_array_equal(weights(reply), WEIGHTS)


def test_resumes_with_another_number_of_workers_and_mode(tmp_path):
    one = Fake("sync", number=1)
    one.join(0)
    one.push(0, 2.0)
    write_checkpoint(tmp_path, one)
    other = Fake("ssp", 1, number=3, correction="rate")
    make_checkpoint(tmp_path, other).restore(other.service)
    for worker in range(3):
        other.join(worker)
    # By this correction a push that is not old counts N times as much.
    (reply,) = other.push(0, 2.0)
    np.testing.assert_array_equal(weights(reply), WEIGHTS - 1 - 3)
    assert reply[1]["clock"] == 2
    assert other.push(0, 2.0) == []  # more than a step ahead of the others


def test_resumed_synchronous_run_waits_for_all_workers(tmp_path):
    one = Fake("sync")
    one.join(0)
    one.join(1)
    one.push(0, 2.0)
    one.push(1, 2.0)
    write_checkpoint(tmp_path, one)
    other = Fake("sync")
    make_checkpoint(tmp_path, other).restore(other.service)
    assert other.join(0) == []
    np.testing.assert_array_equal(weights(*other.join(1)), WEIGHTS - 2)


def test_checkpoint_is_written_when_due_and_changed(tmp_path):
    fake = Fake()
    time = 0.0
    checkpoint = make_checkpoint(tmp_path, fake, 10.0, now=lambda: time)
    checkpoint.write_if_due(fake.service)
    fake.join(0)
    fake.push(0, 2.0)
    for time, exists in [(5.0, False), (9.0, False), (10.0, True)]:  # noqa: B007
        checkpoint.write_if_due(fake.service)
        assert checkpoint.path.exists() is exists
    checkpoint.path.unlink()
    time = 25.0
    checkpoint.write_if_due(fake.service)  # nothing has changed
    fake.push(0, 2.0)
    time = 29.0
    checkpoint.write_if_due(fake.service)
    assert not checkpoint.path.exists()
    time = 31.0
    checkpoint.write_if_due(fake.service)
    assert checkpoint.path.exists()


def test_servers_write_at_the_same_time_and_not_at_the_end(tmp_path):
    """They write at the same times wherever they started, so that files match."""
    time, fakes = 0.0, [Fake(), Fake()]
    checkpoints = [
        make_checkpoint(tmp_path, fake, 10.0, shard=(i, 2), now=lambda: time)
        for i, fake in enumerate(fakes)
    ]
    for time, fake, checkpoint in zip([3.0, 8.0], fakes, checkpoints, strict=True):  # noqa: B007
        fake.join(0)
        fake.push(0, 2.0)
        checkpoint.write_if_due(fake.service)
        checkpoint.end(fake.service)
    assert not list(tmp_path.iterdir())
    time = 10.0
    for fake, checkpoint in zip(fakes, checkpoints, strict=True):
        checkpoint.write_if_due(fake.service)
    assert {p.name for p in tmp_path.iterdir()} == {"server.npz", "server-1.npz"}


def test_checkpoint_is_removed_when_all_workers_have_finished(tmp_path):
    fake = Fake(number=1)
    checkpoint = make_checkpoint(tmp_path, fake)
    fake.join(0)
    fake.push(0, 2.0)
    checkpoint.end(fake.service)
    assert checkpoint.path.exists()
    fake.send(0, Kind.LEAVE, number=1)
    checkpoint.end(fake.service)
    assert not checkpoint.path.exists()


def test_server_starts_anew_without_a_checkpoint(tmp_path):
    fake = Fake()
    make_checkpoint(tmp_path / "new", fake).restore(fake.service)
    weights(*fake.join(0))


@pytest.mark.parametrize("cut", [0, 10, -10])
def test_damaged_checkpoint_raises(tmp_path, cut):
    fake = Fake()
    fake.join(0)
    checkpoint = write_checkpoint(tmp_path, fake)
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:cut])
    with pytest.raises(RuntimeError, match="Remove the file to start anew"):
        make_checkpoint(tmp_path, fake).restore(Fake().service)


def test_interrupted_write_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    fake = Fake()
    fake.join(0)
    checkpoint = write_checkpoint(tmp_path, fake)
    before = checkpoint.path.read_bytes()
    fake.push(0, 2.0)

    def interrupted_savez(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint_module.np, "savez", interrupted_savez)
        patch.setattr(pathlib.Path, "unlink", lambda *_, **__: None)
        write_checkpoint(tmp_path, fake)
    assert checkpoint.path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    make_checkpoint(tmp_path, fake).restore(Fake().service)
    assert list(tmp_path.iterdir()) == [checkpoint.path]


def test_full_disk_does_not_end_training(tmp_path):
    """The file stays as it was, and is written in the next period."""
    fake = Fake(number=1)
    time = 0.0
    checkpoint = make_checkpoint(tmp_path, fake, 10.0, now=lambda: time)
    fake.join(0)
    for time in (0.0, 10.0):  # noqa: B007
        checkpoint.write_if_due(fake.service)
    before = checkpoint.path.read_bytes()
    fake.push(0, 2.0)
    time = 20.0
    with full_disk_after(100):
        checkpoint.write_if_due(fake.service)
        checkpoint.end(fake.service)
    assert "at update 1: [Errno 27] File too large" in fake.lines[-1]
    assert fake.lines[-2] == fake.lines[-1]
    assert checkpoint.path.read_bytes() == before
    time = 25.0
    checkpoint.write_if_due(fake.service)
    assert checkpoint.path.read_bytes() == before
    time = 30.0
    checkpoint.write_if_due(fake.service)
    other = Fake()
    make_checkpoint(tmp_path, other).restore(other.service)
    assert other.lines[-1] == f"resumes from {checkpoint.path}, at update 1"


def test_file_that_cannot_be_removed_is_reported(tmp_path):
    fake = Fake(number=1)
    fake.join(0)
    fake.send(0, Kind.LEAVE, number=1)
    checkpoint = make_checkpoint(tmp_path, fake)
    checkpoint.path.mkdir()
    checkpoint.end(fake.service)
    assert (
        f"cannot remove {checkpoint.path}, although training is complete"
        in fake.lines[-1]
    )


def test_unusable_directory_raises_at_startup(monkeypatch, tmp_path):
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


def test_worker_of_the_last_server_is_asked_to_restart(tmp_path):
    one = Fake()
    one.join(0)
    write_checkpoint(tmp_path, one)
    other = Fake()
    make_checkpoint(tmp_path, other).restore(other.service)
    (reply,) = other.push(0, 2.0, number=4)
    assert "the server was restarted. Start the worker again" in refusal(reply)
