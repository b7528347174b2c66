"""Sessions: requests that come twice, in parts, or out of turn."""

import numpy as np
import pytest

from tf_dgc.server import messages
from tf_dgc.server.messages import REPLY, REQUEST, Kind, Status
from tf_dgc.server.sessions import SessionReply, WorkerSession

BODY = np.arange(3, dtype=np.int32)


class Asking:
    """A session, and what it answers."""

    def __init__(self):
        self.replies = []
        self.session = WorkerSession(9, 0, self.replies.append)

    def ask(self, number, body=BODY, kind=Kind.PUSH, part=0, parts=1):
        fields = {"kind": kind, "number": number, "part": part, "parts": parts}
        words = messages.add_frame(REQUEST, body, incarnation=9, **fields)
        return self.session.receive(*messages.remove_frame(REQUEST, words))

    def told(self):
        return [messages.remove_frame(REPLY, words) for words in self.replies]


def test_a_request_is_answered_once():
    asking = Asking()
    np.testing.assert_array_equal(asking.ask(1), BODY)
    assert asking.session.pending == Kind.PUSH
    asking.session.reply(SessionReply(body=2 * BODY, clock=4))
    ((head, body),) = asking.told()
    assert (head["number"], head["clock"], head["incarnation"]) == (1, 4, 9)
    np.testing.assert_array_equal(body, 2 * BODY)


def test_one_that_comes_again_gets_the_same_reply_and_does_nothing():
    asking = Asking()
    assert asking.ask(1) is not None
    asking.session.reply(SessionReply(body=BODY))
    assert asking.ask(1) is None
    first, second = asking.replies
    np.testing.assert_array_equal(first, second)


def test_one_that_comes_again_while_it_is_held_lets_the_first_go():
    """That one's caller is gone, and would take its successor's reply."""
    asking = Asking()
    asking.ask(1)
    assert asking.ask(1) is None
    asking.session.reply(SessionReply(body=BODY))
    (wait, _), (done, body) = asking.told()
    assert (wait["status"], done["status"]) == (Status.WAIT, Status.DONE)
    np.testing.assert_array_equal(body, BODY)


def test_parts_are_put_together(monkeypatch):
    monkeypatch.setattr(messages, "MAX_WORDS", 2)
    asking, body = Asking(), np.arange(5, dtype=np.int32)
    assert asking.ask(1, body[:2], part=0, parts=3) is None
    assert asking.ask(1, body[:2], part=0, parts=3) is None  # again
    assert asking.ask(2, body[2:4], part=1, parts=3) is None
    np.testing.assert_array_equal(asking.ask(3, body[4:], part=2, parts=3), body)
    asking.session.reply(SessionReply(body=body, clock=6))
    for part in (1, 2):
        assert asking.ask(3 + part, body[:0], Kind.NEXT_PART, part) is None
    told = asking.told()
    assert len(told) == 6
    found = told[-3:]
    assert [head["parts"] for head, _ in found] == [3] * 3
    assert [head["clock"] for head, _ in found] == [6] * 3
    np.testing.assert_array_equal(np.concatenate([b for _, b in found]), body)


def test_replies_that_have_been_had_are_not_kept(monkeypatch):
    """Each may be a model."""
    monkeypatch.setattr(messages, "MAX_WORDS", 2)
    asking, body = Asking(), np.arange(4, dtype=np.int32)
    asking.ask(1)
    asking.session.reply(SessionReply(body=body))
    asking.ask(2, body[:0], Kind.NEXT_PART, 1)
    asking.ask(2, body[:0], Kind.NEXT_PART, 1)  # again
    assert [b.tolist() for _, b in asking.told()] == [[0, 1], [2, 3], [2, 3]]
    assert len(asking.session._body) == 0


def test_who_waits_makes_way():
    asking = Asking()
    asking.session.reply_wait()
    assert asking.replies == []
    asking.ask(1)
    asking.session.reply_wait()
    ((head, _),) = asking.told()
    assert (head["status"], head["number"]) == (Status.WAIT, 1)


@pytest.mark.parametrize("number", [0, 3, 4, 100])
def test_what_is_out_of_turn_is_refused(number):
    asking = Asking()
    for before in (1, 2):
        asking.ask(before)
        asking.session.reply(SessionReply())
    if number == 3:  # while another one is held
        asking.ask(3)
        number = 4
    assert asking.ask(number) is None
    head, body = asking.told()[-1]
    assert head["status"] == Status.REFUSED
    assert head["number"] == number
    assert "a message was lost" in messages.decode_text(body)


def test_parts_out_of_turn_are_refused():
    asking = Asking()
    asking.ask(1, part=0, parts=3)
    assert asking.ask(2, part=2, parts=3) is None
    head, body = asking.told()[-1]
    assert head["status"] == Status.REFUSED
    assert "part 2 came out of order" in messages.decode_text(body)
