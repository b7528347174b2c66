"""Signs of life, and what is said at the end."""

import sys
import time

import numpy as np
import pytest

from tf_dgc.server import messages
from tf_dgc.server.client import Heartbeat
from tf_dgc.server.messages import REQUEST, Kind
from tf_dgc.server.tasks import Task


class Client:
    """Takes what is said."""

    def __init__(self):
        self.heard = []

    def call(self, slot, words, seconds):
        assert slot == 3 + 1
        head, body = messages.remove_frame(REQUEST, words.numpy())
        self.heard.append((Kind(head["kind"]), body))


@pytest.fixture
def begun(monkeypatch):
    monkeypatch.setenv("TF_DGC_HEARTBEAT_TIMEOUT", "0.5")
    client = Client()
    heartbeat = Heartbeat(client, Task(("127.0.0.1:1",), 3, 1), 5)
    heartbeat.start()
    yield client, heartbeat
    heartbeat.leave()


def said_at_the_end(client):
    heard = client.heard
    return [messages.decode_text(body) for kind, body in heard if kind == Kind.LEAVE]


@pytest.mark.parametrize("error", [None, ValueError("a reason")])
def test_an_error_that_ends_the_process_is_said(begun, monkeypatch, error):
    client, heartbeat = begun
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    heartbeat._exit()
    heartbeat.leave()
    assert said_at_the_end(client) == ["ValueError: a reason" if error else ""]


@pytest.mark.parametrize("by", ["leave", "before", "typed"])
def test_an_error_that_was_shown_does_not_end_the_process(monkeypatch, by):
    """As those of a notebook, whose last one stays."""
    client, error = Client(), ValueError("a reason")
    heartbeat = Heartbeat(client, Task(("127.0.0.1:1",), 3, 1), 5)
    if by == "before":
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    heartbeat.start()
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    if by == "typed":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    (heartbeat.leave if by == "leave" else heartbeat._exit)()
    assert said_at_the_end(client) == [""]


def test_who_has_not_begun_has_nobody_to_leave():
    client = Client()
    heartbeat = Heartbeat(client, Task(("127.0.0.1:1",), 3, 1), 5)
    heartbeat.leave()
    heartbeat.stop()
    assert not client.heard


@pytest.mark.parametrize("works", [False, True])
def test_a_beat_says_whether_the_process_computes_something(begun, works):
    client, _ = begun
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        if works:
            np.ones([100, 100]) @ np.ones([100, 100])
        else:
            time.sleep(0.05)
    beats = [int(body[0]) for kind, body in client.heard if kind == Kind.HEARTBEAT]
    assert (max if works else min)(beats) == works
