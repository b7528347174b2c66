"""Members: processes that take part, each with a lease that what it sends renews."""

import dataclasses
import math
import time
from collections.abc import Iterable
from typing import Any

from tf_dgc.cluster import workers
from tf_dgc.server.messages import Kind, Status
from tf_dgc.server.sessions import Reply, Session


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that the server waits.

    Attributes:
        lease: seconds without a sign of life after which a worker counts as gone.
        start: seconds for all workers to come, from the first one on; and for one to
            come again, if the last one is gone and had not done its part.
        wait: seconds that one waits for others that live and do nothing.
        work: seconds that one waits for others that compute something else.
        hold: seconds after which one that waits is told so, and asks again.
    """

    lease: float
    start: float
    wait: float
    work: float
    hold: float = 1.0

    @classmethod
    def of_environment(cls) -> "Limits":
        """Return those of the environment variables `TF_DGC_*`, or the defaults."""
        return cls(
            workers.heartbeat_timeout_seconds(),
            workers.start_timeout_seconds(),
            workers.timeout_seconds(),
            workers.tracing_timeout_seconds(),
        )


@dataclasses.dataclass
class Member:
    """A process of a worker that takes part.

    Attributes:
        worker: index of the worker.
        session: session of its requests.
        seen: time at which it was last heard of.
        worked: time at which it last computed something, as far as is known.
        rate: learning rate of it that counted last; None for a schedule.
        pushed: number of its pushes.
        pushes: number of those that have been applied.
        late: whether its last push came when its step had been taken.
        whole: whether what it waits for are all weights.
        begun: whether it has been given all weights, and may push.
    """

    worker: int
    session: Session
    seen: float = dataclasses.field(default_factory=time.monotonic)
    worked: float = -math.inf
    rate: float | None = None
    pushed: int = 0
    pushes: int = 0
    late: bool = False
    whole: bool = True
    begun: bool = False
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

    def waits_in_vain(
        self, now: float, others: Iterable["Member"], limits: Limits
    ) -> bool:
        """Whether it has waited too long, by requests of any number.

        Args:
            now: time, in seconds.
            others: members that it waits for.
            limits: seconds that it may wait.
        """
        if self._waits is None:
            return False
        worked = max((other.worked for other in others), default=-math.inf)
        idle = now - max(self._waits, worked)
        return idle > limits.wait or now - self._waits > limits.work

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
