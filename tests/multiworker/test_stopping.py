"""Workers of a `fit` stop together: `StopSignal` on a simulated service."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tf_dgc.multiworker import coordination, failures, stopping, workers

NAMES = "a", "b", "c"


class Service:
    """The keys of a coordination service, and the numbers of lookups and timeouts."""

    def __init__(self):
        self.keys = {}
        self.lookups = 0
        self.timeouts = 0
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
            self.lookups += 1
            if not self._changed.wait_for(lambda: key in self.keys, seconds):
                self.timeouts += 1
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self.keys[key]


@pytest.fixture
def service(monkeypatch):
    service = Service()
    for name in ("publish", "unpublish", "lookup"):
        monkeypatch.setattr(coordination, name, getattr(service, name))
    monkeypatch.setattr(workers, "own_name", lambda strategy: strategy.me)
    monkeypatch.setattr(workers, "other_names", lambda strategy: strategy.peers)
    monkeypatch.setattr(stopping, "_numbers", itertools.repeat(0))
    monkeypatch.setattr(stopping, "_ANSWER_SECONDS", 0.05)
    return service


@pytest.fixture
def signals(service):
    signals = [
        stopping.StopSignal(
            SimpleNamespace(me=name, peers=[n for n in NAMES if n != name])
        )
        for name in NAMES
    ]
    yield signals
    for signal in signals:
        signal._exit()


def test_each_worker_looks_up_once_while_none_stops(service, signals):
    """A lookup is a packet, and a pending one takes 20 kB of the service's memory."""
    time.sleep(0.5)
    assert service.lookups == len(NAMES)
    assert service.timeouts == 0
    assert not service.keys


def test_the_end_of_a_fit_leaves_nothing_behind(service, signals):
    for signal in signals:
        signal.end()
        signal._listener.join(10)
        assert not signal._listener.is_alive()
    assert not service.keys


def test_the_end_of_one_worker_does_not_end_the_others(service, signals):
    first, *others = signals
    first.end()
    first._listener.join(10)
    others[0]._ring(others[1]._me, 0, "9", 1)
    wait_until(lambda: others[1]._verdicts)
    assert others[1]._verdicts == ["9"]
    assert all(signal._listener.is_alive() for signal in others)


def test_all_stop_after_the_same_step(service, signals):
    """No worker ends a step before all have begun it, as in a cluster."""
    step, ended = threading.Barrier(len(NAMES)), []

    def train(signal, stop_step):
        for number in itertools.count(1):
            step.wait(10)
            stops = signal.after_step()
            if number == stop_step:
                stops = signal.request()
            if stops:
                return ended.append(number)

    threads = [
        threading.Thread(target=train, args=[signal, 3 * (i == 1)])
        for i, signal in enumerate(signals)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(ended) == len(NAMES)
    assert len(set(ended)) == 1


def test_verdicts_are_received_in_order(service, signals):
    """Also if a later attempt is published first."""
    signal = signals[0]
    for number in (1, 0):
        signal._ring(signal._me, number, str(number), 1)
    wait_until(lambda: len(signal._verdicts) == 2)
    assert signal._verdicts == ["0", "1"]


def test_after_a_failure_the_time_for_the_exit_is_limited(service, signals):
    """If the service answers nevertheless, no thread is left waiting for it."""
    limited = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "reported", threading.Event())
        patch.setattr(failures, "limit_teardown", lambda: limited.append(True))
        signals[0]._exit()
        assert not limited
        failures.reported.set()
        signals[1]._exit()
    assert limited
    assert not any(signal._listener.is_alive() for signal in signals[:2])


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
