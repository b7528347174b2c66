"""How workers of a `fit` hear that one wants to stop, by a simulated service."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tf_dgc.cluster import coordination, workers
from tf_dgc.training import stopping

NAMES = "a", "b", "c"


class Service:
    """The keys of a coordination service, and how often one was asked for in vain."""

    def __init__(self):
        self.keys = {}
        self.in_vain = 0
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
            if not self._changed.wait_for(lambda: key in self.keys, seconds):
                self.in_vain += 1
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self.keys[key]


@pytest.fixture
def service(monkeypatch):
    made = Service()
    for name in ("publish", "unpublish", "lookup"):
        monkeypatch.setattr(coordination, name, getattr(made, name))
    monkeypatch.setattr(workers, "me", lambda strategy: strategy.me)
    monkeypatch.setattr(workers, "peers", lambda strategy: strategy.peers)
    monkeypatch.setattr(stopping, "_numbers", itertools.repeat(0))
    monkeypatch.setattr(stopping, "_LISTEN_SECONDS", 0.01)
    monkeypatch.setattr(stopping, "_ANSWER_SECONDS", 0.05)
    return made


@pytest.fixture
def all_of_them(service):
    made = [
        stopping.Stopping(
            SimpleNamespace(me=name, peers=[n for n in NAMES if n != name])
        )
        for name in NAMES
    ]
    yield made
    for one in made:
        one._exit()


def test_while_nobody_stops_the_service_keeps_nothing(service, all_of_them):
    """It keeps 20 kB of each question that is not answered, and a `fit` takes days."""
    time.sleep(0.5)
    assert service.in_vain == 0
    assert set(service.keys) == {"tf_dgc/stopping/0/bell"}


def test_all_stop_after_the_same_step(service, all_of_them):
    """As between workers: nobody ends a step before all have begun it."""
    step, ended = threading.Barrier(len(NAMES)), []

    def train(one, wants_at):
        for number in itertools.count(1):
            step.wait(10)
            stops = one.after_step()
            if number == wants_at:
                stops = one.want()
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


def test_what_rings_at_once(service, all_of_them):
    """The later verdict rings first: the bell has the number of the earlier one."""
    one = all_of_them[0]
    for number in (0, 1):
        service.publish(f"tf_dgc/stopping/0/{number}/verdict", "9", 1)
    one._attempt = 0
    one._ring()
    deadline = time.monotonic() + 10
    while len(one._verdicts) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one._verdicts == ["9", "9"]
