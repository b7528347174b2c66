"""Sessions: requests that are repeated, split into parts, or out of order."""

import numpy as np
import pytest

from tf_dgc.server import messages
from tf_dgc.server.messages import REPLY, REQUEST, Kind, Status
from tf_dgc.server.sessions import SessionReply, WorkerSession

BODY = np.arange(3, dtype=np.int32)


class RecordedSession:
    """A session that records its replies."""

    def __init__(self):
        self.replies = []
        self.session = WorkerSession(9, 0, self.replies.append)

    def send(self, number, body=BODY, kind=Kind.PUSH, part=0, parts=1):
        fields = {"kind": kind, "number": number, "part": part, "parts": parts}
        words = messages.add_frame(REQUEST, body, incarnation=9, **fields)
        return self.session.receive(*messages.remove_frame(REQUEST, words))

    def read_replies(self):
        return [messages.remove_frame(REPLY, words) for words in self.replies]


def test_a_request_is_answered_once():
    recorded = RecordedSession()
    np.testing.assert_array_equal(recorded.send(1), BODY)
    assert recorded.session.pending == Kind.PUSH
    recorded.session.reply(SessionReply(body=2 * BODY, clock=4))
    ((head, body),) = recorded.read_replies()
    assert (head["number"], head["clock"], head["incarnation"]) == (1, 4, 9)
    np.testing.assert_array_equal(body, 2 * BODY)


def test_repeated_request_gets_the_same_reply():
    recorded = RecordedSession()
    assert recorded.send(1) is not None
    recorded.session.reply(SessionReply(body=BODY))
    assert recorded.send(1) is None
    first, second = recorded.replies
    np.testing.assert_array_equal(first, second)


def test_repeated_request_releases_the_first_call():
    """The first caller is gone, and would take its successor's reply."""
    recorded = RecordedSession()
    recorded.send(1)
    assert recorded.send(1) is None
    recorded.session.reply(SessionReply(body=BODY))
    (wait, _), (done, body) = recorded.read_replies()
    assert (wait["status"], done["status"]) == (Status.WAIT, Status.DONE)
    np.testing.assert_array_equal(body, BODY)


def test_parts_are_joined(monkeypatch):
    monkeypatch.setattr(messages, "MAX_WORDS", 2)
    recorded, body = RecordedSession(), np.arange(5, dtype=np.int32)
    assert recorded.send(1, body[:2], part=0, parts=3) is None
    assert recorded.send(1, body[:2], part=0, parts=3) is None  # again
    assert recorded.send(2, body[2:4], part=1, parts=3) is None
    np.testing.assert_array_equal(recorded.send(3, body[4:], part=2, parts=3), body)
    recorded.session.reply(SessionReply(body=body, clock=6))
    for part in (1, 2):
        assert recorded.send(3 + part, body[:0], Kind.NEXT_PART, part) is None
    replies = recorded.read_replies()
    assert len(replies) == 6
    parts = replies[-3:]
    assert [head["parts"] for head, _ in parts] == [3] * 3
    assert [head["clock"] for head, _ in parts] == [6] * 3
    np.testing.assert_array_equal(np.concatenate([b for _, b in parts]), body)


def test_received_reply_is_dropped(monkeypatch):
    """A reply may hold a whole model."""
    monkeypatch.setattr(messages, "MAX_WORDS", 2)
    recorded, body = RecordedSession(), np.arange(4, dtype=np.int32)
    recorded.send(1)
    recorded.session.reply(SessionReply(body=body))
    recorded.send(2, body[:0], Kind.NEXT_PART, 1)
    recorded.send(2, body[:0], Kind.NEXT_PART, 1)  # again
    assert [b.tolist() for _, b in recorded.read_replies()] == [[0, 1], [2, 3], [2, 3]]
    assert len(recorded.session._body) == 0


def test_reply_wait_answers_a_pending_request():
    recorded = RecordedSession()
    recorded.session.reply_wait()
    assert recorded.replies == []
    recorded.send(1)
    recorded.session.reply_wait()
    ((head, _),) = recorded.read_replies()
    assert (head["status"], head["number"]) == (Status.WAIT, 1)


@pytest.mark.parametrize("number", [0, 3, 4, 100])
def test_request_out_of_order_is_refused(number):
    recorded = RecordedSession()
    for before in (1, 2):
        recorded.send(before)
        recorded.session.reply(SessionReply())
    if number == 3:  # while request 3 is pending
        recorded.send(3)
        number = 4
    assert recorded.send(number) is None
    head, body = recorded.read_replies()[-1]
    assert head["status"] == Status.REFUSED
    assert head["number"] == number
    assert "a message was lost" in messages.decode_text(body)


def test_parts_out_of_order_are_refused():
    recorded = RecordedSession()
    recorded.send(1, part=0, parts=3)
    assert recorded.send(2, part=2, parts=3) is None
    head, body = recorded.read_replies()[-1]
    assert head["status"] == Status.REFUSED
    assert "part 2 came out of order" in messages.decode_text(body)
