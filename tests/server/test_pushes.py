"""Pushes: learning rates that workers set, malformed pushes, and late ones."""

import math

import keras
import numpy as np
import pytest
from served_loop import WEIGHTS, Fake, refusal, weights

from tf_dgc.server.messages import Kind, Status


def test_server_takes_the_learning_rate_that_a_worker_sets():
    fake = Fake()
    fake.join(0)
    fake.join(1)
    fake.push(0, 2.0, rate=0.5)
    fake.push(1, 2.0, rate=0.5)
    before = weights(*fake.push(0, 0.0, rate=0.25))
    np.testing.assert_array_equal(weights(*fake.push(1, 4.0, rate=0.5)), before - 1)
    assert "learning rate 0.25, from worker 0" in fake.lines


def test_learning_rate_of_a_late_worker_does_not_count_yet():
    fake = Fake()
    fake.join(0)
    fake.join(1)
    for _ in range(3):
        fake.push(0, 0.0, rate=0.5)
    before = weights(*fake.push(0, 0.0, rate=0.125))
    for _ in range(3):  # of steps that worker 0 has long completed
        fake.push(1, 0.0, rate=0.25)
    np.testing.assert_array_equal(weights(*fake.push(0, 8.0, rate=0.125)), before - 1)
    fake.push(1, 0.0, rate=0.25)
    before = weights(*fake.push(1, 4.0, rate=0.25))  # worker 1 has caught up
    np.testing.assert_array_equal(weights(*fake.push(1, 4.0, rate=0.25)), before - 1)


@pytest.mark.parametrize("has_backup", [True, False])
def test_learning_rate_of_a_restarted_worker(has_backup):
    """With a backup it resumes at its step; without one its callbacks start over."""
    fake = Fake()
    fake.join(0)
    for _ in range(3):
        fake.push(0, 0.0, rate=0.5)
    fake.join(0, process=1, handed={**fake.handed, "steps": 3 * has_backup})
    fake.push(0, 0.0, process=1, rate=0.25)
    assert ("learning rate 0.25, from worker 0" in fake.lines) == has_backup


def test_first_push_may_bring_another_learning_rate():
    fake = Fake(rule=keras.optimizers.SGD(0.25))
    fake.join(0)
    weights(*fake.push(0, 2.0, rate=0.5))
    assert "learning rate 0.5, from worker 0" in fake.lines


def test_schedule_determines_the_learning_rate():
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.25])
    fake = Fake(rule=keras.optimizers.SGD(rate))
    fake.join(0)
    np.testing.assert_array_equal(
        weights(*fake.push(0, 2.0, rate=math.nan)), WEIGHTS - 1
    )
    weights(*fake.join(1)[-1:])  # with the same schedule
    assert not any("learning rate" in line for line in fake.lines)


def test_malformed_push_is_refused_and_updates_nothing():
    fake = Fake()
    fake.join(0)
    fake.join(1)
    (reply,) = fake.send(0, Kind.PUSH, np.zeros(3, np.int32))
    assert "worker 0 sent a push that is refused" in refusal(reply)
    np.testing.assert_array_equal(weights(*fake.push(1, 0.0)), WEIGHTS)


@pytest.mark.parametrize("mode, failed", [("ssp", False), ("sync", True)])
def test_only_the_malformed_push_of_a_step_is_left_out(mode, failed):
    fake = Fake(mode, 0 if mode == "ssp" else None, number=3)
    for worker in range(3):
        fake.join(worker)
    fake.push(0, 2.0)
    fake.send(1, Kind.PUSH, np.zeros(3, np.int32))
    replies = {slot: (slot, *rest) for slot, *rest in fake.push(2, 2.0)}
    assert "worker 1 sent a push that is refused" in refusal(replies[1])
    for worker in (0, 2):
        if failed:
            assert "cannot continue: worker 1 sent a push" in refusal(replies[worker])
        else:
            np.testing.assert_array_equal(weights(replies[worker]), WEIGHTS - 2)
    assert fake.clock == 1


def test_push_of_a_later_step_is_refused():
    fake = Fake()
    fake.join(0)
    (reply,) = fake.push(0, 1.0, step=3)
    assert "came at 0: the server was restarted" in refusal(reply)


def test_push_of_an_earlier_step_is_refused_and_harms_nobody():
    fake = Fake("ssp", 0)
    fake.join(0)
    fake.join(1)
    for worker in (0, 1):
        fake.push(worker, 2.0)
    fake.push(0, 2.0)
    (reply,) = fake.push(1, 2.0, step=0)
    assert "of step 0 came, but all are of 1" in refusal(reply)
    assert len(fake.push(1, 2.0)) == 2


def test_step_ends_with_a_quorum_and_late_pushes_are_not_applied():
    fake = Fake("backup", number=3, quorum=2)
    for worker in range(3):
        fake.join(worker)
    assert fake.push(2, 3.0) == []
    first, other = fake.push(0, 3.0)
    assert {first[0], other[0]} == {0, 2}
    np.testing.assert_array_equal(weights(first), WEIGHTS - 3)
    (late,) = fake.push(1, 3.0, step=0)
    np.testing.assert_array_equal(weights(late, Status.LATE), WEIGHTS - 3)
    (again,) = fake.push(1, 3.0, step=0, repeat=True)
    assert again[1]["status"] == Status.LATE
    assert fake.push(1, 3.0) == []
    assert [reply[1]["status"] for reply in fake.push(0, 3.0)] == [Status.DONE] * 2
    assert fake.clock == 2
    assert "2 updates; " in fake.service.summary()
    assert "1 pushes came too late" in fake.service.summary()


@pytest.mark.parametrize("event", ["leaves", "falls silent"])
def test_quorum_shrinks_when_workers_leave(event):
    fake = Fake("backup", number=3, quorum=2)
    for worker in range(3):
        fake.join(worker)
    assert fake.push(0, 2.0) == []
    if event == "leaves":
        fake.send(1, Kind.LEAVE, number=1)
        replies = fake.send(2, Kind.LEAVE, number=1)
        assert weights(replies[1]).tolist() == (WEIGHTS - 1).tolist()
    else:
        replies = []
        for _ in range(12):
            replies += fake.wait(1, [(0, 0)])
            if replies[-1:] and replies[-1][1]["status"] == Status.DONE:
                break
            fake.send(0, Kind.POLL)
        assert weights(replies[-1]).tolist() == (WEIGHTS - 1).tolist()
    assert len(fake.push(0, 2.0)) == 1


def test_staleness_is_counted():
    fake = Fake()
    fake.join(0)
    fake.join(1)
    fake.push(0, 1.0)
    fake.push(0, 1.0)
    fake.push(1, 1.0, step=0)
    assert fake.service.model.ages == {0: 2, 2: 1}
    assert fake.service.summary().endswith("computed: 0: 2, 2: 1")
