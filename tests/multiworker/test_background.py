"""Reductions in the background: their order, and their counts for the watch."""

import gc
import threading
import time

import pytest
import tensorflow as tf

import tf_dgc
from tf_dgc._internals import tf_collectives
from tf_dgc.multiworker import background
from tf_dgc.multiworker.background import BackgroundReduction
from tf_dgc.multiworker.positions import Position, describe_position


@pytest.fixture
def lane(strategies):
    strategy = tf_dgc.prepare(strategies[2])
    with strategy.scope():
        yield BackgroundReduction(strategy)


def begin(lane, number, value):
    with tf.device("CPU:0"):
        lane.begin(number, [tf.constant(value)])


def test_reductions_run_in_order_and_are_waited_for(strategies, retracing_warnings):
    lane, done = BackgroundReduction(strategies[1]), []
    go_on = threading.Event()

    def work(number, value):
        tf.py_function(
            lambda v: (go_on.wait(10), done.append((number, int(v)))), [value], []
        )

    lane.work = work
    for number in range(6):
        begin(lane, number, 10 * number)
    assert done == []
    go_on.set()
    for number in range(6):
        lane.wait()
        assert done[: number + 1] == [(n, 10 * n) for n in range(number + 1)]
    lane.wait()  # nothing is pending
    lane.finish()
    assert not retracing_warnings


def test_forgotten_reductions_are_not_waited_for(strategies):
    lane = BackgroundReduction(strategies[1])
    begin(lane, 0, 1)
    lane.finish()
    lane.forget()
    lane.wait()
    begin(lane, 1, 1)
    lane.wait()


def test_the_thread_ends_with_its_lane(strategies):
    lane = BackgroundReduction(strategies[1])
    begin(lane, 0, 1)
    lane.wait()
    thread = lane._thread
    del lane
    for _ in range(50):
        gc.collect()
        if not thread.is_alive():
            break
        time.sleep(0.1)
    assert not thread.is_alive()


def test_counting_works_while_a_lane_is_created(lane, strategies, monkeypatch):
    """The watch's threads may count at any time; an error would end them."""
    local_variable = background.tf_collectives.local_variable
    counts = []

    def count_and_create(*args):
        counts.append(background.count_background_collectives(strategies[2]))
        return local_variable(*args)

    monkeypatch.setattr(background.tf_collectives, "local_variable", count_and_create)
    monkeypatch.setattr(background.workers, "all_names", lambda _: ["a", "b"])
    another = BackgroundReduction(strategies[2])
    assert counts
    assert all((-lane.number, 0, 1) in groups for groups in counts)
    assert not any((-another.number, 0, 1) in groups for groups in counts)
    assert (-another.number, 0, 1) in background.count_background_collectives(
        strategies[2]
    )


def test_a_lane_that_is_not_waited_for_counts_as_finished(lane, monkeypatch):
    monkeypatch.setattr(background.workers, "all_names", lambda _: ["a", "b"])
    counts = {None: [3, 2], (0, 1): [5, 5]}
    monkeypatch.setattr(lane.hook, "count", lambda: counts)
    number = -lane.number
    assert lane.count() == {(number, 0, 1): [8, 8]}  # all workers are a group
    lane._met = True
    assert lane.count() == {(number, 0, 1): [8, 7]}
    position = Position({(number, 0, 1): (8, 7)}, False, "here")
    assert describe_position(position) == "collective 8 in the background"
    assert position.waits_for(1)
    assert Position.from_json(position.to_json()) == position


def test_lanes_have_keys_of_their_own(lane):
    assert tf_collectives.group_key((0, 1)) == tf_collectives.group_key((0, 1), 0)
    keys = {tf_collectives.group_key(m, n) for m in [(0, 1), (0, 2)] for n in range(3)}
    assert len(keys) == 6
