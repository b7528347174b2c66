"""Unknown, damaged and outdated senders are refused, without harm to others."""

import json

import numpy as np
import pytest
from served_loop import WEIGHTS, Fake, encoded_model_spec, refusal, weights

from tf_dgc.server import messages
from tf_dgc.server.messages import REQUEST, Kind, Status


def test_refusal_names_the_reason():
    fake = Fake()
    fake.join(0)
    (reply,) = fake.push(1, 1.0, secret=[1, 2, 3, 4])
    assert "in the name of worker 1 is refused: its secret differs" in refusal(reply)
    (reply,) = fake.take(1, np.zeros(40, np.int32))
    assert "it is of another program or version" in refusal(reply)
    (reply,) = fake.send(1, 77)
    assert "its kind, 77, is unknown" in refusal(reply)
    words = messages.add_frame(
        REQUEST, np.zeros([0], np.int32), kind=Kind.PUSH, worker=0, number=3
    )
    (reply,) = fake.take(1, words)
    assert "it says that it is of worker 0" in refusal(reply)
    assert fake.clock == 0
    assert sum("in the name of worker 1" in line for line in fake.lines) == 4


@pytest.mark.parametrize("case", ["secret", "garbage", "old process"])
def test_refusal_does_not_reach_the_waiting_worker(case):
    """A reply goes to the oldest call in a slot: that of the waiting worker."""
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    assert fake.push(1, 2.0) == []
    if case == "garbage":
        worker_reply, foreign_reply = fake.take(1, np.zeros(40, np.int32))
    else:
        overrides = {"secret": [1, 2, 3, 4]} if case == "secret" else {"process": 7}
        worker_reply, foreign_reply = fake.push(1, 2.0, number=5, **overrides)
    assert (worker_reply[1]["status"], worker_reply[1]["incarnation"]) == (
        Status.WAIT,
        100,
    )
    assert foreign_reply[1]["incarnation"] != 100 or foreign_reply[1]["number"] == 5
    refusal(foreign_reply)
    assert fake.send(1, Kind.POLL) == []
    for reply in fake.push(0, 2.0):
        np.testing.assert_array_equal(weights(reply), WEIGHTS - 2)


def test_refusal_carries_the_senders_numbers():
    fake = Fake()
    (reply,) = fake.push(1, 1.0, number=5, process=3, secret=[1, 2, 3, 4])
    assert (reply[1]["number"], reply[1]["incarnation"]) == (5, 103)


def test_refused_newcomer_does_not_replace_the_worker():
    fake = Fake("sync")
    fake.join(0)
    fake.join(1)
    fake.push(1, 2.0)
    spec = {**fake.handed, "variables": []}
    text = messages.encode_text(json.dumps(spec))
    worker_reply, newcomer_reply = fake.send(1, Kind.JOIN, text, process=1)
    assert worker_reply[1]["status"] == Status.WAIT
    assert "The server refuses worker 1" in refusal(newcomer_reply)
    assert fake.send(1, Kind.POLL) == []
    assert len(fake.push(0, 2.0)) == 2
    assert fake.service.failure is None


def test_newcomer_replaces_the_worker_after_its_last_part():
    fake = Fake()
    fake.join(0)
    body = encoded_model_spec(fake)
    half = len(body) // 2
    parts = {"process": 1, "parts": 2}
    fake.send(0, Kind.JOIN, body[:half], part=0, **parts)
    np.testing.assert_array_equal(weights(*fake.push(0, 2.0)), WEIGHTS - 1)
    fake.send(0, Kind.JOIN, body[half:], part=1, **parts)
    assert "worker 0 is replaced by another process (1 pushes applied)" in fake.lines
    assert "does not know this process" in refusal(*fake.push(0, 2.0))
    np.testing.assert_array_equal(
        weights(*fake.send(0, Kind.START, process=1)), WEIGHTS - 1
    )


def test_replaced_process_does_not_end_its_successor():
    fake = Fake("ssp", 0)
    fake.join(0)
    fake.join(1)
    fake.join(1, process=1)
    fake.push(1, 2.0, process=1)
    worker_reply, old_reply = fake.push(1, 2.0)
    assert (worker_reply[1]["status"], worker_reply[1]["incarnation"]) == (
        Status.WAIT,
        101,
    )
    assert "does not know this process" in refusal(old_reply)
    fake.send(1, Kind.LEAVE, number=9)
    assert fake.send(1, Kind.POLL, process=1) == []
    assert len(fake.push(0, 2.0)) == 2


def test_any_text_as_model_spec_is_refused():
    for text in ("", "[]", "{}", "null", '{"version": 1}'):
        fake = Fake()
        (reply,) = fake.send(0, Kind.JOIN, messages.encode_text(text))
        assert "The server refuses worker 0" in refusal(reply)
        weights(*fake.join(1))
