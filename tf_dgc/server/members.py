"""Members: processes that take part, each with a lease that what it sends renews."""

import dataclasses
import time
from typing import Any

from tf_dgc.cluster import workers
from tf_dgc.server.messages import Kind, Status
from tf_dgc.server.sessions import Reply, Session


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that the server waits.

    Attributes:
        lease: seconds without a sign of life after which a worker counts as gone.
        start: seconds for all workers to come, from the first one on.
        wait: seconds that one waits for others that live and do not come.
        hold: seconds after which one that waits is told so, and asks again.
    """

    lease: float
    start: float
    wait: float
    hold: float = 1.0

    @classmethod
    def of_environment(cls) -> "Limits":
        """Return those of the environment variables `TF_DGC_*`, or the defaults."""
        return cls(
            workers.heartbeat_timeout_seconds(),
            workers.start_timeout_seconds(),
            workers.timeout_seconds(),
        )


@dataclasses.dataclass
class Member:
    """A process of a worker that takes part.

    Attributes:
        worker: index of the worker.
        session: session of its requests.
        seen: time at which it was last heard of.
        rate: learning rate that it named last; None before its first push.
        pushes: number of its pushes that have been applied.
        whole: whether what it waits for are all weights.
    """

    worker: int
    session: Session
    seen: float = dataclasses.field(default_factory=time.monotonic)
    rate: float | None = None
    pushes: int = 0
    whole: bool = True
    _held: float = 0.0
    _waits: float | None = None

    def hold(self, now: float) -> None:
        """Note that a request of it is to be answered later."""
        self._held = now
        if self.session.held != Kind.ASK:
            self.whole = self.session.held == Kind.START
        if self._waits is None:
            self._waits = now

    @property
    def waits(self) -> bool:
        """Whether it asked for something that is to come."""
        return self.session.held in (Kind.START, Kind.PUSH, Kind.ASK)

    def waited(self, now: float) -> float:
        """Return the seconds for which it has waited, by requests of any number."""
        return 0.0 if self._waits is None else now - self._waits

    def give(self, reply: Reply) -> None:
        """Answer the request that is held, by what was asked for."""
        self._waits = None
        self.session.answer(reply)

    def put_off(self, now: float, seconds: float) -> None:
        """Tell it to ask again, if it has been held for so long."""
        if now - self._held >= seconds:
            self.session.answer(Reply(Status.WAIT))

    def refuse(self, reason: str) -> None:
        """Answer the request that is held, if there is one."""
        if self.session.held is not None:
            self.give(Reply.refused(reason))


class Members(dict[int, Member]):
    """Members by worker; those that are gone are not in it."""

    def find(self, head: Any) -> Member | None:
        """Return the member that a message is from, or None."""
        member = self.get(int(head["worker"]))
        same = member is not None and member.session.incarnation == head["incarnation"]
        return member if same else None

    def forgive(self, seconds: float) -> None:
        """Let time in which nobody was heard count against no one."""
        for member in self.values():
            member.seen += seconds

    def silent(self, now: float, seconds: float) -> list[Member]:
        """Return those that have not been heard of for so long."""
        return [m for m in self.values() if now - m.seen > seconds]
