"""Heartbeats, and the reason that a worker reports when it leaves."""

import sys
import time

import numpy as np
import pytest

from tf_dgc.server import messages
from tf_dgc.server.client import Heartbeat
from tf_dgc.server.messages import REQUEST, Kind
from tf_dgc.server.tasks import Task


class RecordingClient:
    """Records messages instead of sending them."""

    def __init__(self):
        self.calls = []

    def call(self, slot, words, seconds):
        assert slot == 3 + 1
        head, body = messages.remove_frame(REQUEST, words.numpy())
        self.calls.append((Kind(head["kind"]), body))


@pytest.fixture
def client_and_heartbeat(monkeypatch):
    monkeypatch.setenv("TF_DGC_HEARTBEAT_TIMEOUT", "0.5")
    client = RecordingClient()
    heartbeat = Heartbeat(client, Task(("127.0.0.1:1",), 3, 1), 5)
    heartbeat.start()
    yield client, heartbeat
    heartbeat.leave()


def leave_reasons(client):
    return [
        messages.decode_text(body) for kind, body in client.calls if kind == Kind.LEAVE
    ]


@pytest.mark.parametrize("error", [None, ValueError("a reason")])
def test_error_that_ends_the_process_is_reported(
    client_and_heartbeat, monkeypatch, error
):
    client, heartbeat = client_and_heartbeat
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    heartbeat._exit()
    heartbeat.leave()
    assert leave_reasons(client) == ["ValueError: a reason" if error else ""]


@pytest.mark.parametrize("case", ["leave", "before", "typed"])
def test_error_that_was_only_displayed_is_not_reported(monkeypatch, case):
    """A notebook goes on, and keeps its last error in `sys.last_value`."""
    client, error = RecordingClient(), ValueError("a reason")
    heartbeat = Heartbeat(client, Task(("127.0.0.1:1",), 3, 1), 5)
    if case == "before":
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    heartbeat.start()
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    if case == "typed":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    if case == "leave":
        heartbeat.leave()
    else:
        heartbeat._exit()
    assert leave_reasons(client) == [""]


def test_leave_before_start_sends_nothing():
    client = RecordingClient()
    heartbeat = Heartbeat(client, Task(("127.0.0.1:1",), 3, 1), 5)
    heartbeat.leave()
    heartbeat.stop()
    assert not client.calls


@pytest.mark.parametrize("computes", [False, True])
def test_heartbeat_reports_whether_the_process_computes(client_and_heartbeat, computes):
    client, _ = client_and_heartbeat
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        if computes:
            np.ones([100, 100]) @ np.ones([100, 100])
        else:
            time.sleep(0.05)
    beats = [int(body[0]) for kind, body in client.calls if kind == Kind.HEARTBEAT]
    assert (max if computes else min)(beats) == computes
