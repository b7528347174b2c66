"""The server's loop: takes messages, refuses what is none, and answers each once."""

import contextlib
import hmac
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from tf_dgc.server import checking, turns
from tf_dgc.server.members import Limits, Member
from tf_dgc.server.messages import (
    REPLY,
    REQUEST,
    DamagedError,
    Kind,
    Push,
    Status,
    brief,
    head_of,
    seal,
    secret_words,
    to_body,
    to_text,
    unseal,
)
from tf_dgc.server.runs import Runs
from tf_dgc.server.saved import Saved
from tf_dgc.server.service import Service
from tf_dgc.server.sessions import Session


class Transport(Protocol):
    """What takes messages and returns replies, as `rpc.Server` does."""

    def take(self) -> tuple[int, np.ndarray]:
        """Wait for a message, or for anything else; return slot, or -1, and words."""

    def answer(self, slot: int, words: np.ndarray) -> None:
        """Return words to the oldest message of a slot."""


class Loop:
    """Serves models, or shards of them, to workers, until all that came have left.

    Worker i has two slots: i for its steps, N + i for signs of life, also while a step
    waits.

    Args:
        transport: source of messages.
        num_workers: number of workers, N.
        limits: seconds that are waited.
        secret: text that all processes share, or None for that of `TF_DGC_SECRET`.
        say: function that is given lines of the log.
        now: function that returns the time, in seconds.
        saved: checkpoint that is written, and gone on from; None for none.
        shard: index of this server, and number of servers.

    Attributes:
        runs: services that do what is asked for.
    """

    def __init__(
        self,
        transport: Transport,
        num_workers: int,
        limits: Limits,
        secret: str | None = None,
        say: Callable[[str], None] = print,
        now: Callable[[], float] = time.monotonic,
        saved: Saved | None = None,
        shard: tuple[int, int] = (0, 1),
    ):
        self.runs = Runs(num_workers, shard, limits, say, saved)
        self._transport, self._num_workers = transport, num_workers
        self._newcomers: dict[int, Session] = {}  # by worker; not yet let in
        self._secret = np.array(secret_words(secret), "<i4").tobytes()
        self._say, self._now = say, now

    def run(self) -> None:
        """Serve until it is over.

        Raises:
            RuntimeError: if the first run's checkpoint cannot be read.
        """
        self.runs.service(0)
        while not self.runs.is_over(self._now()):
            slot, words = self._transport.take()
            begin = self._now()
            if slot >= 0:
                self._take(slot, words)
            self.runs.settle(self._now())
            # Meanwhile signs of life have come, and nobody has taken them.
            self.runs.forgive(self._now() - begin)
        self.runs.end()

    def _take(self, slot: int, words: np.ndarray) -> None:
        """Take a message of a slot, which gets one reply."""
        try:
            head, body = unseal(REQUEST, words)
            kind = self._check(slot, head)
        except DamagedError as error:
            worker = slot % self._num_workers
            reason = f"a message in the name of worker {worker} is refused: {error}"
            self._say(reason)
            self._refuse(slot, reason, head_of(words))
            return
        found = self.runs.find(head)
        if found is not None:
            found[1].seen = self._now()
        if kind in (Kind.BEAT, Kind.LEAVE):
            self._take_sign(slot, head, body, found)
        elif found is not None:
            self._take_step(*found, head, body)
        else:
            self._take_newcomer(slot, head, body)

    def _refuse(self, slot: int, reason: str, head: Any) -> None:
        """Answer who is not, or no longer, known in a slot that may be another's."""
        self._make_way(slot)
        fields = {"status": Status.REFUSED, **_address(head)}
        self._transport.answer(slot, seal(REPLY, to_body(reason), parts=1, **fields))

    def _make_way(self, slot: int) -> None:
        for _, member in self.runs.of_worker(slot):
            member.session.make_way()

    def _check(self, slot: int, head: Any) -> Kind:
        """Return the kind of a message.

        Raises:
            DamagedError: if it is of no kind, has another secret or is in another
                worker's name.
        """
        if not hmac.compare_digest(head["secret"].tobytes(), self._secret):
            raise DamagedError(
                "its secret is another one (environment variable TF_DGC_SECRET)"
            )
        kinds = set(map(int, Kind))
        if head["kind"] not in kinds:
            raise DamagedError(f"its kind, {head['kind']}, is unknown")
        kind = Kind(head["kind"])
        own = int(head["worker"]) + self._num_workers * (
            kind in (Kind.BEAT, Kind.LEAVE)
        )
        if slot != own:
            raise DamagedError(f"it says that it is of worker {head['worker']}")
        return kind

    def _take_sign(
        self,
        slot: int,
        head: Any,
        body: np.ndarray,
        found: tuple[Service, Member] | None,
    ) -> None:
        if found is not None and head["kind"] == Kind.LEAVE:
            self.runs.leave(*found, to_text(body))
        elif found is not None and body.any():
            found[1].worked = self._now()
        nothing = np.zeros([0], np.int32)
        self._transport.answer(slot, seal(REPLY, nothing, parts=1, **_address(head)))

    def _take_step(
        self, service: Service, member: Member, head: Any, body: np.ndarray
    ) -> None:
        kind = Kind(head["kind"])
        whole = member.session.take(head, body, service.most_words(kind))
        if whole is not None:
            with self._expelling(member):
                self._do(service, member, head, whole)

    def _do(
        self, service: Service, member: Member, head: Any, whole: np.ndarray
    ) -> None:
        kind = Kind(head["kind"])
        if kind == Kind.PUSH:
            push = Push(whole, member.worker, int(head["step"]))
            wrong = service.push(member, push, float(head["rate"]))
            if wrong:
                member.refuse(wrong)
                return
        service.do(member, kind, whole, self._now())

    def _take_newcomer(self, slot: int, head: Any, body: np.ndarray) -> None:
        """Take a message of a process that does not take part.

        One of the same worker that does goes on until this one is let in.
        """
        if head["kind"] != Kind.JOIN:
            reason = (
                f"The server does not know this process of worker {slot}: it "
                "has dropped it, as it did not respond or another one took its place, "
                "or was itself started again. Start the worker again."
            )
            if self.runs.has_left(int(head["incarnation"])):
                reason = turns.LEFT
            self._refuse(slot, reason, head)
            return
        self._make_way(slot)
        session = self._newcomers.get(slot)
        if session is None or session.incarnation != head["incarnation"]:
            session = self._newcomers[slot] = self._session(slot, head)
        whole = session.take(head, body, checking.most_words(Kind.JOIN, 0))
        if whole is not None:
            del self._newcomers[slot]
            member = Member(slot, session, self._now())
            with self._expelling(member):
                self.runs.admit(member, whole, self._now())

    @contextlib.contextmanager
    def _expelling(self, member: Member) -> Iterator[None]:
        """Let an error that a message brings about end its sender's part alone."""
        try:
            yield
        except Exception as error:
            reason = f"cannot go on: {brief(error)}"
            self._say(f"worker {member.worker} {reason}")
            self.runs.expel(member, reason)

    def _session(self, slot: int, head: Any) -> Session:
        def send(words: np.ndarray) -> None:
            self._transport.answer(slot, words)

        return Session(int(head["incarnation"]), int(head["number"]) - 1, send)


def _address(head: Any) -> dict[str, Any]:
    """Return the fields of a reply to a message, by which its sender knows it."""
    return {name: head[name] for name in ("incarnation", "number")}
