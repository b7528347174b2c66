"""Signs of life, and what is said at the end."""

import sys
import time

import numpy as np
import pytest

from tf_dgc.server import messages
from tf_dgc.server.heartbeat import Heartbeat
from tf_dgc.server.messages import REQUEST, Kind
from tf_dgc.server.tasks import Task


class Client:
    """Takes what is said."""

    def __init__(self):
        self.heard = []

    def call(self, slot, words, seconds):
        assert slot == 3 + 1
        head, body = messages.unseal(REQUEST, words.numpy())
        self.heard.append((Kind(head["kind"]), body))


@pytest.fixture
def begun(monkeypatch):
    monkeypatch.setenv("TF_DGC_HEARTBEAT_TIMEOUT", "0.5")
    client = Client()
    heartbeat = Heartbeat(client, Task("127.0.0.1:1", 3, 1), 5)
    heartbeat.start()
    yield client, heartbeat
    heartbeat.leave()


@pytest.fixture(autouse=True)
def _nothing_was_wrong(monkeypatch):
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.setattr("tf_dgc.server.heartbeat._exit_codes", [])


@pytest.mark.parametrize(
    "code, said", [(None, ""), (0, ""), (3, "sys.exit(3)"), ("no", "sys.exit('no')")]
)
def test_an_exit_code_is_said(begun, code, said):
    client, heartbeat = begun
    with pytest.raises(SystemExit):
        sys.exit(code)
    heartbeat.leave()
    heartbeat.leave()
    told = [messages.to_text(body) for kind, body in client.heard if kind == Kind.LEAVE]
    assert told == [said]


@pytest.mark.parametrize("works", [False, True])
def test_a_beat_says_whether_the_process_computes_something(begun, works):
    client, _ = begun
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        if works:
            np.ones([100, 100]) @ np.ones([100, 100])
        else:
            time.sleep(0.05)
    beats = [int(body[0]) for kind, body in client.heard if kind == Kind.BEAT]
    assert (max if works else min)(beats) == works
