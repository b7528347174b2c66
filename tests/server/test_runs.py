"""Runs: a process trains with one `ServerOptimizer` after another."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from served_loop import LIMITS, WEIGHTS, Fake, refusal, weights
from serving import ServerGroup, TracedTrainer, leave_at_end, run_together, some_weights

from tf_dgc.server.checkpoint import ServerCheckpoint
from tf_dgc.server.messages import Kind
from tf_dgc.server.process import TrainingRuns


def spec_of_run(fake, run, **overrides):
    return {**fake.handed, "run": run, **overrides}


def make_worker(served, monkeypatch, worker, shapes, seed=1):
    optimizer = served.optimizer(monkeypatch, worker, keras.optimizers.SGD(0.5))
    return TracedTrainer(optimizer, some_weights(shapes, "float32", seed))


@pytest.mark.slow
@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_second_model_trains_after_the_first(monkeypatch, servers):
    """With other shapes and initial weights, on all workers."""
    with ServerGroup(2, servers=servers) as served:
        firsts = [make_worker(served, monkeypatch, i, [(4,), (3,)]) for i in range(2)]
        seconds = [
            make_worker(served, monkeypatch, i, [(5,), (2,)], 2) for i in range(2)
        ]

        def train(i):
            for _ in range(2):
                firsts[i].step([np.ones(4, "f"), np.ones(3, "f")])
            for _ in range(3):
                seconds[i].step([np.ones(5, "f"), np.ones(2, "f")])

        with leave_at_end(*seconds):
            run_together(lambda: train(0), lambda: train(1))
        initial_weights = some_weights([(5,), (2,)], "float32", 2)
        for worker in seconds:
            assert int(worker.optimizer.iterations) == 3
            for actual, initial in zip(worker.weights(), initial_weights, strict=True):
                np.testing.assert_allclose(actual, initial - 1.5, rtol=1e-5)
        for server in served.servers:
            server.join()  # it ends, because all workers have left
        log = "\n".join(served.lines)
        assert log.count("has left, to begin another run (2 pushes") == 2 * servers
        assert log.count("run 2: worker 0 has left (3 pushes applied)") == servers
        assert log.count("run 2: 3 updates") == servers
        assert "refused" not in log


@pytest.mark.slow
def test_optimizer_of_an_ended_run_raises(monkeypatch):
    gradients = [np.ones(4, "f")]
    with ServerGroup(1) as served:
        first, second = (make_worker(served, monkeypatch, 0, [(4,)]) for _ in range(2))
        first.step(gradients)
        second.step(gradients)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="process trains at a tim"
        ):
            first.step(gradients)
        for method in (first.optimizer.join, first.optimizer.pull_weights):
            with pytest.raises(RuntimeError, match="compile it with a new one"):
                method()
        second.step(gradients)
        second.optimizer.leave()
        with pytest.raises(RuntimeError, match="or `leave` was called"):
            second.optimizer.join()


def test_two_optimizers_in_one_step_raise(monkeypatch):
    """For example those of a GAN."""
    with ServerGroup(1) as served:
        workers = [make_worker(served, monkeypatch, 0, [(4,)]) for _ in range(2)]

        def apply():
            for worker in workers:
                worker.optimizer.apply([tf.ones(4)], worker.variables)

        step = tf.function(apply, autograph=False)
        with pytest.raises(RuntimeError, match="such as a GAN, use `DGCOptimizer`"):
            step()


def test_others_continue_in_a_run_that_one_worker_left():
    """They join the next one when they have finished their part."""
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(0, 2.0)
    before = len(fake.sent)
    assert fake.join(1, 1, spec_of_run(fake, 1)) == []
    (reply,) = (reply for reply in fake.sent[before:] if reply[0] == 0)
    np.testing.assert_array_equal(weights(reply), WEIGHTS - 1)
    assert "no longer takes part" in refusal(fake.push(1, 2.0)[-1])
    for reply in fake.join(0, 2, spec_of_run(fake, 1)):
        np.testing.assert_array_equal(weights(reply), WEIGHTS)
    assert list(fake.loop.runs) == [fake.loop.runs.service(1)]
    fake.send(0, Kind.LEAVE, process=2, number=1)
    assert not fake.loop.runs.is_over(fake.time)
    fake.send(1, Kind.LEAVE, process=1, number=1)
    assert fake.loop.runs.is_over(fake.time)


def test_restarted_process_joins_the_first_run():
    """It trains from the start, because nobody else is left in that run."""
    fake = Fake()
    for worker in range(2):
        fake.join(worker)
        fake.push(worker, 2.0)
        fake.join(worker, 1, spec_of_run(fake, 1))
    np.testing.assert_array_equal(weights(*fake.join(0, process=2)), WEIGHTS)
    assert "run 2: worker 0 is replaced by another process (0 pushes appl" in "".join(
        fake.lines
    )
    assert not fake.loop.runs.is_over(fake.time)


@pytest.mark.parametrize("run", [1, 7, -1, 0.5, "", None])
def test_worker_refused_in_another_run_stays_in_its_own(run):
    fake = Fake(number=1)
    fake.join(0)
    error = fake.join(0, 1, spec_of_run(fake, run, version="0"))
    assert "The server refuses worker 0" in error
    assert list(fake.loop.runs) == [fake.service]
    np.testing.assert_array_equal(weights(*fake.push(0, 2.0)), WEIGHTS - 1)


def test_each_run_has_its_own_checkpoint(tmp_path):
    """It is removed when the run is done, and a restarted server resumes from it."""
    first, second = tmp_path / "server.npz", tmp_path / "server-run-2.npz"
    time = 0.0

    def start_server():
        fake = Fake(number=1)
        checkpoint = ServerCheckpoint(
            tmp_path, 10.0, fake.lines.append, now=lambda: time
        )
        fake.loop.runs = TrainingRuns(1, (0, 1), LIMITS, fake.lines.append, checkpoint)
        return fake

    fake, restarted = start_server(), start_server()
    fake.join(0)
    fake.push(0, 2.0)
    time = 10.0
    fake.push(0, 2.0)
    assert first.exists()
    fake.join(0, 1, spec_of_run(fake, 1))
    assert not first.exists()
    fake.push(0, 2.0, process=1)
    time = 20.0
    fake.push(0, 2.0, process=1)
    assert [path.name for path in tmp_path.iterdir()] == [second.name]
    np.testing.assert_array_equal(weights(*restarted.join(0)), WEIGHTS)
    (reply,) = restarted.join(0, 1, spec_of_run(restarted, 1))
    np.testing.assert_array_equal(weights(reply), WEIGHTS - 2)
    assert "run 2: resumes from" in "".join(restarted.lines)
    restarted.send(0, Kind.LEAVE, process=1, number=1)
    assert not second.exists()
