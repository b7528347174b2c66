"""How workers of a `fit` hear that one wants to stop, by a simulated service."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tf_dgc.multiworker import coordination, failures, stopping, workers

NAMES = "a", "b", "c"


class Service:
    """The keys of a coordination service, and how often one was asked for."""

    def __init__(self):
        self.keys = {}
        self.asked = self.in_vain = 0
        self._changed = threading.Condition()

    def publish(self, key, value, seconds):
        with self._changed:
            if key in self.keys:
                raise tf.errors.AlreadyExistsError(None, None, key)
            self.keys[key] = value
            self._changed.notify_all()

    def unpublish(self, key, seconds):
        with self._changed:
            if self.keys.pop(key, None) is None:
                raise tf.errors.NotFoundError(None, None, key)

    def lookup(self, key, seconds):
        with self._changed:
            self.asked += 1
            if not self._changed.wait_for(lambda: key in self.keys, seconds):
                self.in_vain += 1
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self.keys[key]


@pytest.fixture
def service(monkeypatch):
    made = Service()
    for name in ("publish", "unpublish", "lookup"):
        monkeypatch.setattr(coordination, name, getattr(made, name))
    monkeypatch.setattr(workers, "own_name", lambda strategy: strategy.me)
    monkeypatch.setattr(workers, "other_names", lambda strategy: strategy.peers)
    monkeypatch.setattr(stopping, "_numbers", itertools.repeat(0))
    monkeypatch.setattr(stopping, "_ANSWER_SECONDS", 0.05)
    return made


@pytest.fixture
def all_of_them(service):
    made = [
        stopping.StopSignal(
            SimpleNamespace(me=name, peers=[n for n in NAMES if n != name])
        )
        for name in NAMES
    ]
    yield made
    for one in made:
        one._exit()


def test_while_nobody_stops_each_worker_asks_once(service, all_of_them):
    """Questions are packets, and the service keeps 20 kB of each without an answer."""
    time.sleep(0.5)
    assert service.asked == len(NAMES)
    assert service.in_vain == 0
    assert not service.keys


def test_the_end_of_a_fit_leaves_nothing_behind(service, all_of_them):
    for one in all_of_them:
        one.end()
        one._listener.join(10)
        assert not one._listener.is_alive()
    assert not service.keys


def test_who_ends_first_does_not_end_the_others(service, all_of_them):
    first, *others = all_of_them
    first.end()
    first._listener.join(10)
    others[0]._ring(others[1]._me, 0, "9", 1)
    wait_until(lambda: others[1]._verdicts)
    assert others[1]._verdicts == ["9"]
    assert all(one._listener.is_alive() for one in others)


def test_all_stop_after_the_same_step(service, all_of_them):
    """As between workers: nobody ends a step before all have begun it."""
    step, ended = threading.Barrier(len(NAMES)), []

    def train(one, wants_at):
        for number in itertools.count(1):
            step.wait(10)
            stops = one.after_step()
            if number == wants_at:
                stops = one.request()
            if stops:
                return ended.append(number)

    threads = [
        threading.Thread(target=train, args=[one, 3 * (i == 1)])
        for i, one in enumerate(all_of_them)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(ended) == len(NAMES)
    assert len(set(ended)) == 1


def test_verdicts_are_heard_in_their_order(service, all_of_them):
    """Also if the bell of a later attempt rings first."""
    one = all_of_them[0]
    for number in (1, 0):
        one._ring(one._me, number, str(number), 1)
    wait_until(lambda: len(one._verdicts) == 2)
    assert one._verdicts == ["0", "1"]


def test_after_a_failure_the_time_for_the_exit_is_limited(service, all_of_them):
    """The service may not answer; if it does, nothing is left waiting for it."""
    limited = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "reported", threading.Event())
        patch.setattr(failures, "limit_teardown", lambda: limited.append(True))
        all_of_them[0]._exit()
        assert not limited
        failures.reported.set()
        all_of_them[1]._exit()
    assert limited
    assert not any(one._listener.is_alive() for one in all_of_them[:2])


def wait_until(holds):
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
