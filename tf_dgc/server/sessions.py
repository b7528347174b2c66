"""Sessions: of what comes from a worker's process, each request once and whole.

A request that comes again, since its caller did not get the reply, gets the same reply,
and acts only once. Every message gets one reply, in the order of their arrival: one
whose caller is gone takes a reply with it, which must not be its successor's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_dgc.server.messages import (
    MOST_WORDS,
    REPLY,
    Kind,
    Status,
    num_parts,
    part_of,
    seal,
    to_body,
)

_NOTHING = np.zeros([0], np.int32)
_LOST = "a message was lost, or is of another process"


@dataclasses.dataclass
class Reply:
    """What a request comes to.

    Attributes:
        status: status of the reply.
        body: all words of it, int32 `[w]`.
        clock: number of updates that the weights have had.
    """

    status: Status = Status.DONE
    body: np.ndarray = dataclasses.field(default_factory=lambda: _NOTHING)
    clock: int = 0

    @classmethod
    def refused(cls, reason: str) -> "Reply":
        """Return the reply to who is refused."""
        return cls(Status.REFUSED, to_body(reason))


class Session:
    """Takes the messages of one process of a worker.

    Args:
        incarnation: number of that process.
        number: number of its last request before.
        send: function that returns words to the oldest message that waits.

    Attributes:
        incarnation: number of the process.
        held: kind of the request that has not been answered, or None.
    """

    def __init__(
        self, incarnation: int, number: int, send: Callable[[np.ndarray], None]
    ):
        self.incarnation = incarnation
        self.held: Kind | None = None
        self._send = send
        self._number = number
        self._last: np.ndarray | None = None  # reply to the last request
        self._parts: list[np.ndarray] = []
        self._outgoing: tuple[np.ndarray, int] = (_NOTHING, 0)

    def take(
        self, head: Any, body: np.ndarray, most: int = MOST_WORDS
    ) -> np.ndarray | None:
        """Take a message; return the body of a request that is complete and new.

        All else is answered here.

        Args:
            head: head of it, a record of `REQUEST`.
            body: words behind it.
            most: number of words that the body of such a request may have.
        """
        if head["number"] == self._number:
            self._repeat()
            return None
        if head["number"] != self._number + 1 or self.held is not None:
            came = f"request {head['number']} came behind {self._number}"
            self._refuse(head, f"{came}: {_LOST}")
            return None
        self._number, self._last = int(head["number"]), None
        if head["kind"] == Kind.MORE:
            self._give(Status.DONE, int(head["part"]))
            return None
        wrong = self._why_not(head, body, most)
        if wrong:
            self._refuse(head, wrong)
            return None
        self._parts.append(body)
        if head["part"] + 1 < head["parts"]:
            self._answer(Status.DONE, _NOTHING, 0)
            return None
        whole = np.concatenate(self._parts)
        self._parts, self.held = [], Kind(head["kind"])
        return whole

    def _why_not(self, head: Any, body: np.ndarray, most: int) -> str | None:
        """Return why a part is not the next one, or None."""
        if head["part"] != len(self._parts) * (head["part"] > 0):
            return f"part {head['part']} came out of turn: {_LOST}"
        if head["part"] == 0:
            self._parts = []
        if sum(map(len, self._parts)) + len(body) > most:
            self._parts = []
            return f"a request of more than {most} words came"
        return None

    def answer(self, reply: Reply) -> None:
        """Answer the request that is held."""
        self.held = None
        self._outgoing = reply.body, reply.clock
        self._give(reply.status, 0)

    def make_way(self) -> None:
        """Tell who waits to ask again, as another caller is behind it.

        Else that one's reply, which is to come at once, would be taken by this one.
        """
        if self.held is not None:
            self.answer(Reply(Status.WAIT))

    def _give(self, status: Status, part: int) -> None:
        """Answer by a part of the reply, of which nothing is kept behind the last."""
        body, clock = self._outgoing
        parts = num_parts(len(body))
        if part + 1 >= parts:
            self._outgoing = _NOTHING, 0
        self._answer(status, part_of(body, part), clock, part, parts)

    def _repeat(self) -> None:
        """Answer once more; or, if that is still to come, the message before this."""
        if self._last is None:
            self._send(self._sealed(Status.WAIT, _NOTHING, 0, 0, 1))
        else:
            self._send(self._last)

    def _refuse(self, head: Any, why: str) -> None:
        body = to_body(why)
        fields = {"incarnation": head["incarnation"], "number": head["number"]}
        self._send(seal(REPLY, body, status=Status.REFUSED, parts=1, **fields))

    def _answer(
        self,
        status: Status,
        body: np.ndarray,
        clock: int,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self._last = self._sealed(status, body, clock, part, parts)
        self._send(self._last)

    def _sealed(
        self, status: Status, body: np.ndarray, clock: int, part: int, parts: int
    ) -> np.ndarray:
        return seal(
            REPLY,
            body,
            status=status,
            incarnation=self.incarnation,
            number=self._number,
            clock=clock,
            part=part,
            parts=parts,
        )
