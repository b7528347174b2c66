"""Sessions: requests that are repeated, split into parts, or out of order."""

import numpy as np
import pytest

from tf_dgc.server import messages
from tf_dgc.server.messages import REPLY, REQUEST, Kind, Status
from tf_dgc.server.sessions import SessionReply, WorkerSession

BODY = np.arange(3, dtype=np.int32)


class SessionRecorder:
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


def test_request_is_answered_once():
    recorder = SessionRecorder()
    np.testing.assert_array_equal(recorder.send(1), BODY)
    assert recorder.session.pending == Kind.PUSH
    recorder.session.reply(SessionReply(body=2 * BODY, clock=4))
    ((head, body),) = recorder.read_replies()
    assert (head["number"], head["clock"], head["incarnation"]) == (1, 4, 9)
    np.testing.assert_array_equal(body, 2 * BODY)


def test_repeated_request_gets_the_same_reply():
    recorder = SessionRecorder()
    assert recorder.send(1) is not None
    recorder.session.reply(SessionReply(body=BODY))
    assert recorder.send(1) is None
    first, second = recorder.replies
    np.testing.assert_array_equal(first, second)


def test_repeated_request_releases_the_first_call():
    """The first caller is gone, and would take its successor's reply."""
    recorder = SessionRecorder()
    recorder.send(1)
    assert recorder.send(1) is None
    recorder.session.reply(SessionReply(body=BODY))
    (wait, _), (done, body) = recorder.read_replies()
    assert (wait["status"], done["status"]) == (Status.WAIT, Status.DONE)
    np.testing.assert_array_equal(body, BODY)


def test_parts_are_joined(monkeypatch):
    monkeypatch.setattr(messages, "MAX_WORDS", 2)
    recorder, body = SessionRecorder(), np.arange(5, dtype=np.int32)
    assert recorder.send(1, body[:2], part=0, parts=3) is None
    assert recorder.send(1, body[:2], part=0, parts=3) is None  # again
    assert recorder.send(2, body[2:4], part=1, parts=3) is None
    np.testing.assert_array_equal(recorder.send(3, body[4:], part=2, parts=3), body)
    recorder.session.reply(SessionReply(body=body, clock=6))
    for part in (1, 2):
        assert recorder.send(3 + part, body[:0], Kind.NEXT_PART, part) is None
    replies = recorder.read_replies()
    assert len(replies) == 6
    parts = replies[-3:]
    assert [head["parts"] for head, _ in parts] == [3] * 3
    assert [head["clock"] for head, _ in parts] == [6] * 3
    np.testing.assert_array_equal(np.concatenate([b for _, b in parts]), body)


def test_received_reply_is_dropped(monkeypatch):
    """A reply may hold a whole model."""
    monkeypatch.setattr(messages, "MAX_WORDS", 2)
    recorder, body = SessionRecorder(), np.arange(4, dtype=np.int32)
    recorder.send(1)
    recorder.session.reply(SessionReply(body=body))
    recorder.send(2, body[:0], Kind.NEXT_PART, 1)
    recorder.send(2, body[:0], Kind.NEXT_PART, 1)  # again
    assert [b.tolist() for _, b in recorder.read_replies()] == [[0, 1], [2, 3], [2, 3]]
    assert len(recorder.session._body) == 0


def test_reply_wait_answers_a_pending_request():
    recorder = SessionRecorder()
    recorder.session.reply_wait()
    assert recorder.replies == []
    recorder.send(1)
    recorder.session.reply_wait()
    ((head, _),) = recorder.read_replies()
    assert (head["status"], head["number"]) == (Status.WAIT, 1)


@pytest.mark.parametrize("number", [0, 3, 4, 100])
def test_request_out_of_order_is_refused(number):
    recorder = SessionRecorder()
    for before in (1, 2):
        recorder.send(before)
        recorder.session.reply(SessionReply())
    if number == 3:  # while request 3 is pending
        recorder.send(3)
        number = 4
    assert recorder.send(number) is None
    head, body = recorder.read_replies()[-1]
    assert head["status"] == Status.REFUSED
    assert head["number"] == number
    assert "a message was lost" in messages.decode_text(body)


def test_parts_out_of_order_are_refused():
    recorder = SessionRecorder()
    recorder.send(1, part=0, parts=3)
    assert recorder.send(2, part=2, parts=3) is None
    head, body = recorder.read_replies()[-1]
    assert head["status"] == Status.REFUSED
    assert "part 2 came out of order" in messages.decode_text(body)
