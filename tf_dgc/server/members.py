"""Members: processes that take part, each with a lease that what it sends renews."""

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tf_dgc.cluster import workers
from tf_dgc.server.clock import names
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
    """Members by worker; those that are gone are not in it.

    Args:
        num_workers: number of workers, N.

    Attributes:
        begun: time at which the first one came, in seconds; None before.
        done: indices of the workers that have done their part.
    """

    def __init__(self, num_workers: int):
        super().__init__()
        self.begun: float | None = None
        self.done: set[int] = set()
        self._num_workers = num_workers
        self._seen = 0.0  # when somebody was there last

    def come(self, member: Member, now: float) -> None:
        """Note that a process takes part.

        Args:
            member: member that it is.
            now: time, in seconds.
        """
        self.begun = now if self.begun is None else self.begun
        self.done.discard(member.worker)
        self[member.worker] = member

    @property
    def missing(self) -> list[int]:
        """Indices of the workers of which no process takes part, ascending."""
        return sorted(set(range(self._num_workers)) - set(self))

    @property
    def are_done(self) -> bool:
        """Whether all workers have done their part."""
        return len(self.done) == self._num_workers

    def note(self, now: float) -> None:
        """Note that somebody is there, if so."""
        if self:
            self._seen = now

    def stay_away(self, now: float, seconds: float) -> bool:
        """Whether nobody has been there for so long."""
        return not self and now - self._seen > seconds

    def find(self, head: Any) -> Member | None:
        """Return the member that a message is from, or None."""
        member = self.get(int(head["worker"]))
        same = member is not None and member.session.incarnation == head["incarnation"]
        return member if same else None

    def in_vain(
        self, member: Member, others: Sequence[int], now: float, limits: Limits
    ) -> str | None:
        """Return what is said to one that has waited too long, or None.

        Args:
            member: member that waits.
            others: indices of the workers that it waits for.
            now: time, in seconds.
            limits: seconds that it may wait.
        """
        present = [self[i] for i in others if i in self]
        if not member.waits_in_vain(now, present, limits):
            return None
        return (
            f"worker {member.worker} waited {limits.wait:g} s (environment variable "
            f"TF_DGC_TIMEOUT) for {names(others)}, which responds but does not come, "
            "and computes nothing"
        )

    def forgive(self, seconds: float) -> None:
        """Let time in which nobody was heard count against no one."""
        for member in self.values():
            member.seen += seconds

    def silent(self, now: float, seconds: float) -> list[Member]:
        """Return those that have not been heard of for so long."""
        return [m for m in self.values() if now - m.seen > seconds]
