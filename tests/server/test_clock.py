"""`StepClock`: which pushes form a step, and which workers wait."""

import math
import random

import pytest

from tf_dgc.server.sessions import StepClock, worker_names


def make_clock(staleness, num_workers):
    clock = StepClock(staleness)
    for worker in range(num_workers):
        clock.join(worker)
    return clock


def test_modes():
    def staleness_and_quorum(mode, staleness=None, quorum=None):
        settings = {"mode": mode, "staleness": staleness, "quorum": quorum}
        clock = StepClock.from_settings(settings)
        return clock.staleness, clock.quorum

    assert staleness_and_quorum("sync") == (0, None)
    assert staleness_and_quorum("async") == (math.inf, None)
    assert staleness_and_quorum("ssp", 3) == (3, None)
    assert staleness_and_quorum("backup", None, 2) == (math.inf, 2)
    with pytest.raises(ValueError, match="no mode 'fast'"):
        staleness_and_quorum("fast")
    assert worker_names([0, 2]) == "worker 0 and worker 2"
    assert worker_names([]) == "nobody"


def test_without_staleness_one_push_per_worker_is_a_step():
    clock = make_clock(0, 3)
    clock.push(2)
    assert clock.take_steps() == []
    assert not clock.may_continue(2)
    assert clock.blockers(2) == [0, 1]
    clock.push(0)
    clock.push(1)
    assert clock.take_steps() == [[0, 1, 2]]
    assert clock.take_steps() == []
    assert all(map(clock.may_continue, range(3)))


def test_each_asynchronous_push_is_a_step_and_nobody_waits():
    clock = make_clock(math.inf, 2)
    for _ in range(100):
        clock.push(1)
        assert clock.take_steps() == [[1]]
        assert clock.may_continue(1)
    assert clock.blockers(1) == []


def test_worker_too_far_ahead_waits_for_the_slowest():
    clock = make_clock(2, 3)
    clock.push(1)
    for _ in range(2):
        clock.push(0)
        assert clock.take_steps()[-1] == [0]
        assert clock.may_continue(0)
    clock.push(0)
    assert clock.take_steps() == [[0]]
    assert not clock.may_continue(0)
    assert clock.blockers(0) == [2]
    clock.push(2)
    assert clock.take_steps() == [[2]]
    assert clock.may_continue(0)


def test_first_pushes_of_a_quorum_form_a_step():
    clock = make_clock(math.inf, 3)
    clock.quorum = 2
    clock.push(2)
    assert clock.take_steps() == []
    assert clock.blockers(2) == [0, 1]
    clock.push(0)
    assert clock.take_steps() == [[0, 2]]
    assert all(map(clock.may_continue, range(3)))
    clock.push(1)
    clock.leave(0)
    clock.leave(2)
    assert clock.take_steps() == [[1]]


@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_worker_that_left_blocks_nobody_and_its_push_counts(staleness):
    clock = make_clock(staleness, 2)
    clock.push(0)
    early = clock.take_steps()
    clock.leave(1)
    clock.leave(0)
    clock.join(1)
    if staleness:
        assert early == [[0]]
    else:
        assert early == []
        clock.push(1)
        assert clock.take_steps() == [[0, 1]]
    assert clock.may_continue(1)


def test_late_worker_starts_at_the_slowest_workers_step():
    clock = make_clock(1, 1)
    for _ in range(5):
        clock.push(0)
    clock.join(1)
    assert clock.completed == {0: 5, 1: 5}
    clock.push(0)
    clock.take_steps()
    assert clock.may_continue(0)
    clock.push(0)
    clock.take_steps()
    assert not clock.may_continue(0)


def test_push_of_an_ended_process_counts_for_its_successor():
    clock = make_clock(0, 2)
    clock.push(1)
    clock.leave(1)
    clock.join(1)
    assert not clock.may_continue(1)
    clock.push(0)
    assert clock.take_steps() == [[0, 1]]
    assert clock.may_continue(1)


@pytest.mark.parametrize("staleness", [0, 1, 3, math.inf])
def test_lead_is_bounded_and_every_push_is_applied_once(staleness):
    """In random order, while workers leave and join."""
    rng = random.Random(0)
    clock = make_clock(staleness, 4)
    num_pushes = 0
    due = []
    busy = dict.fromkeys(range(4), True)  # in a step
    for _ in range(3000):
        worker = rng.randrange(4)
        event = rng.random()
        if event < 0.02 and worker in clock.completed and len(clock.completed) > 1:
            clock.leave(worker)
            del busy[worker]
        elif event < 0.1 and worker not in clock.completed:
            clock.join(worker)
            busy[worker] = False
        elif busy.get(worker):
            clock.push(worker)
            num_pushes += 1
            busy[worker] = False
        due += [w for group in clock.take_steps() for w in group]
        for other, is_busy in busy.items():
            if not is_busy and clock.may_continue(other):
                clock.begin_step(other)
                busy[other] = True
        waiting = [w for w, is_busy in busy.items() if not is_busy]
        assert len(waiting) < len(busy), "all workers wait"
        assert all(clock.blockers(w) for w in waiting)
    assert clock.max_lead <= staleness
    assert num_pushes - 4 <= len(due) <= num_pushes
    assert num_pushes > 500
