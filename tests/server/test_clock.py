"""The clock: what is a step, and who waits."""

import math
import random

import pytest

from tf_dgc.server.sessions import StepClock, worker_names


def started(staleness, number):
    clock = StepClock(staleness)
    for worker in range(number):
        clock.join(worker)
    return clock


def test_modes():
    def of(mode, staleness=None, quorum=None):
        settings = {"mode": mode, "staleness": staleness, "quorum": quorum}
        clock = StepClock.from_settings(settings)
        return clock.staleness, clock.quorum

    assert of("sync") == (0, None)
    assert of("async") == (math.inf, None)
    assert of("ssp", 3) == (3, None)
    assert of("backup", None, 2) == (math.inf, 2)
    with pytest.raises(ValueError, match="no mode 'fast'"):
        of("fast")
    assert worker_names([0, 2]) == "worker 0 and worker 2"
    assert worker_names([]) == "nobody"


def test_without_staleness_all_pushes_of_a_clock_are_one_step():
    clock = started(0, 3)
    clock.push(2)
    assert clock.take_steps() == []
    assert not clock.may_continue(2)
    assert clock.blockers(2) == [0, 1]
    clock.push(0)
    clock.push(1)
    assert clock.take_steps() == [[0, 1, 2]]
    assert clock.take_steps() == []
    assert all(map(clock.may_continue, range(3)))


def test_asynchronous_pushes_are_steps_of_their_own_and_nobody_waits():
    clock = started(math.inf, 2)
    for _ in range(100):
        clock.push(1)
        assert clock.take_steps() == [[1]]
        assert clock.may_continue(1)
    assert clock.blockers(1) == []


def test_a_worker_that_is_too_far_ahead_waits_for_the_slowest():
    clock = started(2, 3)
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


def test_the_first_pushes_of_a_quorum_are_a_step():
    clock = started(math.inf, 3)
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
def test_who_leaves_is_not_waited_for_and_its_push_counts(staleness):
    clock = started(staleness, 2)
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


def test_who_joins_late_begins_where_the_slowest_is():
    clock = started(1, 1)
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


def test_a_push_that_a_process_left_behind_is_that_of_the_next_one():
    clock = started(0, 2)
    clock.push(1)
    clock.leave(1)
    clock.join(1)
    assert not clock.may_continue(1)
    clock.push(0)
    assert clock.take_steps() == [[0, 1]]
    assert clock.may_continue(1)


@pytest.mark.parametrize("staleness", [0, 1, 3, math.inf])
def test_no_worker_is_further_ahead_and_every_push_is_due_once(staleness):
    """Whatever the order, and whoever comes and goes."""
    draw = random.Random(0)
    clock, pushed, due = started(staleness, 4), 0, []
    busy = dict.fromkeys(range(4), True)  # in a step
    for _ in range(3000):
        worker, kind = draw.randrange(4), draw.random()
        if kind < 0.02 and worker in clock.completed and len(clock.completed) > 1:
            clock.leave(worker)
            del busy[worker]
        elif kind < 0.1 and worker not in clock.completed:
            clock.join(worker)
            busy[worker] = False
        elif busy.get(worker):
            clock.push(worker)
            pushed += 1
            busy[worker] = False
        due += [w for group in clock.take_steps() for w in group]
        for other, works in busy.items():
            if not works and clock.may_continue(other):
                clock.begin_step(other)
                busy[other] = True
        waiting = [w for w, works in busy.items() if not works]
        assert len(waiting) < len(busy), "all wait"
        assert all(clock.blockers(w) for w in waiting)
    assert clock.max_lead <= staleness
    assert pushed - 4 <= len(due) <= pushed
    assert pushed > 500
