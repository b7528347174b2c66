"""The watch: which states of a worker count as waiting."""

import contextlib
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from test_failures import STRATEGY

from tf_dgc._internals import tf_collectives
from tf_dgc.collectives import cross_device
from tf_dgc.multiworker import failures, workers
from tf_dgc.multiworker.positions import Collective, Position
from tf_dgc.multiworker.watch import Watch, coordination


def waits(position):
    return position.waits_in == [None]


def test_an_error_ends_waiting():
    """The program may catch it, and create a variable in another way."""
    watch = Watch(STRATEGY, lambda: {None: [9, 9]})
    with pytest.raises(MemoryError), watch.waiting("create"):
        assert waits(watch._position())
        raise MemoryError
    assert not waits(watch._position())


def test_a_collective_that_an_error_ended_is_not_waited_in(strategies, monkeypatch):
    """The program may catch the error, and be busy with other things for long."""
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "10")
    strategy = strategies[2]
    count = cross_device.compressed_cross_device_ops(strategy).count

    @tf.function
    def step(loss):
        def replica():
            # The first replica's collective has been counted when the other's fails.
            context = tf.distribute.get_replica_context()
            value = tf.constant(1.0)
            if context.replica_id_in_sync_group == 1:
                slow = tf.sort(tf.random.stateless_normal([1_000_000], [1, 2]))
                check = tf.debugging.assert_less(loss, 5.0 + 0.0 * slow[0])
                with tf.control_dependencies([check]):
                    value = tf.identity(value)
            return context.all_reduce("SUM", value)

        return strategy.run(replica)

    # TensorFlow never forgets a group whose first meeting failed.
    step(tf.constant(1.0))
    # The error itself, or that of the collective which it ended.
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.CancelledError)):
        step(tf.constant(9.0))
    started, finished = count()[None]
    assert finished < started
    watch = Watch(STRATEGY, count)
    now = time.monotonic()
    for later in (0, 100):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        assert watch._reason_to_give_up(watch._position()) is None
    step(tf.constant(1.0))
    assert not waits(watch._position())


@contextlib.contextmanager
def in_tensorflow():
    """Let a thread wait in TensorFlow; yield a function that ends it."""
    queue = tf.queue.FIFOQueue(1, tf.int32)
    dequeue = tf.function(queue.dequeue)
    queue.enqueue(1)
    dequeue()
    thread = threading.Thread(target=dequeue)
    thread.start()

    def end():
        if thread.is_alive():
            queue.enqueue(1)
            thread.join()

    try:
        while "execute" not in sys._current_frames()[thread.ident].f_code.co_name:
            time.sleep(0.01)
        yield end
    finally:
        end()


def test_operations_of_tensorflow_count_as_waiting():
    with in_tensorflow():
        assert waits(Watch(STRATEGY, lambda: {None: [9, 8]})._position())
    assert not waits(Watch(STRATEGY, lambda: {None: [9, 8]})._position())


def test_a_collective_that_begins_meanwhile_is_not_lost():
    counts = iter([{None: pair} for pair in ([8, 8], [9, 8], [9, 8])])
    watch = Watch(STRATEGY, lambda: next(counts))
    watch._position()
    assert not watch._aborted


def test_positions_are_published_when_they_matter(monkeypatch):
    """At once if the worker waits or traces; else at half of the limit."""
    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "40")
    published, now = [], [1000.0]
    service = coordination
    monkeypatch.setattr(service, "publish", lambda key, text, _: published.append(text))
    monkeypatch.setattr(service, "unpublish", lambda *_: None)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = Watch(STRATEGY, dict)

    def is_published(seconds, *position):
        now[0] = 1000.0 + seconds
        published.clear()
        watch._publish(Position(*position))
        return [Position.from_json(text) for text in published] == [Position(*position)]

    done, waits, later = {None: (5, 5)}, {None: (6, 5)}, {None: (6, 6)}
    assert is_published(0, done, False, "a.py:1")
    assert not is_published(2, done, False, "a.py:1")
    assert not is_published(4, done, False, "a.py:2")
    assert is_published(6, waits, False, "a.py:3")
    assert not is_published(8, waits, False, "a.py:3")
    assert not is_published(10, later, False, "a.py:3")
    assert is_published(12, later, True, "a.py:3")
    assert is_published(14, later, False, "a.py:3")
    assert not is_published(33, later, False, "a.py:4")
    assert is_published(34, later, False, "a.py:4")
    assert not is_published(90, later, False, "a.py:4")
    assert is_published(92, later, False, "a.py:5")


def test_the_pending_collective_is_identified():
    """Keys of collectives that an error ended are subtracted."""
    launches = {5: tf_collectives.TracedCollective("sum", "float32", "(3,)", ())}
    keys = iter([{None: 1}, {None: 1 + 5}, {None: 1 + 7}])
    counts = {None: [9, 8]}
    watch = Watch(STRATEGY, lambda: counts, lambda: next(keys))
    with mock.patch.object(tf_collectives, "_traced_collectives", launches):
        # Nothing runs: an error has ended it.
        assert watch._position().collectives == {}
        counts = {None: [10, 8]}
        with in_tensorflow():
            static, dynamic = (watch._position().collectives[None] for _ in range(2))
    assert static == Collective(5, "sum of float32 (3,)")
    assert dynamic.key == 7
    assert "known at run time" in dynamic.name


def test_the_pending_purpose_is_identified():
    watch = Watch(STRATEGY, lambda: {None: [9, 9]})
    with watch.waiting("create"):
        assert watch._position().collectives == {None: Collective.of_purpose("create")}
    with watch.waiting("compare"):
        collective = watch._position().collectives[None]
    assert collective.name == "compare"
    assert collective.key != Collective.of_purpose("create").key
    assert watch._position().collectives == {}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_keys_of_collectives_add_up_to_the_pending_one(strategies, eager, static):
    strategy = strategies[2]
    hook = cross_device.compressed_cross_device_ops(strategy)
    seen = []

    def step(length):
        def replica():
            words = tf.ones([11 if static else length], tf.int32)
            context = tf.distribute.get_replica_context()
            return context.merge_call(
                lambda _, w: hook.communicate(False, tf.zeros([0]), w), args=(words,)
            )[1]

        return strategy.run(replica)

    key_of = tf_collectives.collective_key

    def collective_key(kind, tensor):
        key = key_of(kind, tensor)
        value = tf.get_static_value(key)
        seen.append(None if value is None else int(value))
        return key

    with mock.patch.object(tf_collectives, "collective_key", collective_key):
        before, lost = hook.count()[None], hook.pending_keys()[None]
        (step if eager else tf.function(step))(tf.constant(11))
    started, finished = np.subtract(hook.count()[None], before)
    assert started == finished == 1
    assert hook.pending_keys()[None] == lost  # of an error in another test
    number = int(key_of("_all_gather", tf.ones([11], tf.int32)))
    assert set(seen) == ({number} if static or eager else {None})
    counters = tf_collectives.Counters()
    counters.start(tf.ones([]), tf.constant(number))
    assert (counters.read(), counters.pending_key()) == ([1, 0], number)
    counters.finish(tf.ones([]), tf.constant(number))
    assert (counters.read(), counters.pending_key()) == ([1, 1], 0)
    if static:
        launch = tf_collectives.find_collective(number)
        assert launch[:3] == ("all_gather", "int32", "(11,)")
        place = failures.place_in(launch.places)
        assert eager or place.partition(":")[0] == __file__


def test_a_fault_of_the_watch_does_not_end_it(monkeypatch, capsys):
    """Without the watch, a worker might wait for ever."""
    calls = []

    def count():
        calls.append(threading.current_thread())
        raise KeyError("a group that is not known")

    monkeypatch.setenv(workers.TIMEOUT_VARIABLE, "0.1")
    watch = Watch(STRATEGY, count)
    monkeypatch.setattr(failures, "note_end", lambda strategy: None)
    watch.start()
    try:
        while min(map(calls.count, watch._threads)) < 3:
            time.sleep(0.01)
    finally:
        watch._end()
    errors = capsys.readouterr().err
    assert errors.count("error in the watch, which continues") == len(watch._threads)
    assert "a group that is not known" in errors
