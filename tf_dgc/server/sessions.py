"""Sessions: of what comes from a worker's process, each request once and whole.

A request that comes again, since its caller did not get the reply, gets the same reply,
and acts only once. Every message gets one reply, in the order of their arrival: one
whose caller is gone takes a reply with it, which must not be its successor's.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tf_dgc.multiworker import workers
from tf_dgc.server.messages import (
    MAX_WORDS,
    REPLY,
    Kind,
    Status,
    add_frame,
    num_parts,
    part_of,
    to_body,
)

_NOTHING = np.zeros([0], np.int32)
_LOST = "a message was lost, or is of another process"


@dataclasses.dataclass
class SessionReply:
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
    def refused(cls, reason: str) -> "SessionReply":
        """Return the reply to who is refused."""
        return cls(Status.REFUSED, to_body(reason))


class WorkerSession:
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
        self, head: Any, body: np.ndarray, most: int = MAX_WORDS
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

    def answer(self, reply: SessionReply) -> None:
        """Answer the request that is held."""
        self.held = None
        self._outgoing = reply.body, reply.clock
        self._give(reply.status, 0)

    def make_way(self) -> None:
        """Tell who waits to ask again, as another caller is behind it.

        Else that one's reply, which is to come at once, would be taken by this one.
        """
        if self.held is not None:
            self.answer(SessionReply(Status.WAIT))

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
        self._send(add_frame(REPLY, body, status=Status.REFUSED, parts=1, **fields))

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
        return add_frame(
            REPLY,
            body,
            status=status,
            incarnation=self.incarnation,
            number=self._number,
            clock=clock,
            part=part,
            parts=parts,
        )


# --- The clock: which pushes become a step, and which workers may go on.


class StepClock:
    """Counts the pushes of each worker, and bounds how far one may be ahead.

    Args:
        staleness: number of completed steps that a worker may be ahead of the slowest
            one; 0 makes the pushes of all workers of one clock one step; infinity lets
            nobody wait.
        quorum: number of pushes that make a step, of those that were computed by the
            same weights; all of them if there are fewer workers. None for a step of
            each push, or of all, by `staleness`.

    Attributes:
        completed: number of pushes of each worker that takes part, by index, counted
            from where the slowest was as it joined.
        most_ahead: most completed steps that any worker began one ahead of the slowest.
    """

    def __init__(self, staleness: float, quorum: int | None = None):
        self.staleness, self.quorum = staleness, quorum
        self.completed: dict[int, int] = {}
        self.most_ahead = 0
        self._pending: list[int] = []

    @classmethod
    def of_settings(cls, settings: dict[str, Any]) -> "StepClock":
        """Return the clock of a mode.

        Args:
            settings: "mode", "staleness" and "quorum" of an optimizer.

        Raises:
            ValueError: for a mode that there is not.
        """
        found = {
            "sync": (0, None),
            "async": (math.inf, None),
            "ssp": (settings["staleness"], None),
            "backup": (math.inf, settings["quorum"]),
        }
        if settings["mode"] not in found:
            raise ValueError(f"there is no mode {settings['mode']!r}")
        return cls(*found[settings["mode"]])

    @property
    def workers(self) -> list[int]:
        """Indices of the workers that take part, ascending."""
        return sorted(self.completed)

    def join(self, worker: int) -> None:
        """Let a worker take part, from where the slowest one is.

        A push of it that was left behind, and is not yet applied, is its next one.
        """
        slowest = min(self.completed.values(), default=0)
        self.completed[worker] = slowest + (worker in self._pending)

    def leave(self, worker: int) -> None:
        """Let a worker take part no longer; a push of it that came counts."""
        self.completed.pop(worker, None)

    def push(self, worker: int) -> None:
        """Count a push."""
        self.completed[worker] += 1
        self._pending.append(worker)

    def due(self) -> list[list[int]]:
        """Return which pushes are to be applied now, each list as one step.

        In the order in which they came; those of one step by the workers' indices.
        """
        if self.quorum is None and self.staleness > 0:
            found = [[worker] for worker in self._pending]
        elif self._pending and self._is_full():
            found = [sorted(self._pending)]
        else:
            return []
        self._pending = []
        return found

    def _is_full(self) -> bool:
        if self.quorum is None:
            return not set(self.completed) - set(self._pending)
        return len(self._pending) >= min(self.quorum, len(self.completed))

    def may_go_on(self, worker: int) -> bool:
        """Whether a worker may begin its next step."""
        return worker not in self._pending and self._ahead(worker) <= self.staleness

    def go_on(self, worker: int) -> None:
        """Note that a worker begins its next step."""
        self.most_ahead = max(self.most_ahead, self._ahead(worker))

    def waited_for(self, worker: int) -> list[int]:
        """Return for which workers one waits, ascending."""
        if self.may_go_on(worker):
            return []
        if worker in self._pending:
            return sorted(set(self.completed) - set(self._pending))
        slowest = self.completed[worker] - self.staleness
        return sorted(w for w, done in self.completed.items() if done < slowest)

    def _ahead(self, worker: int) -> int:
        return self.completed.get(worker, 0) - min(self.completed.values(), default=0)


def worker_names(workers: Iterable[int]) -> str:
    """Return workers as errors name them."""
    return " and ".join(f"worker {worker}" for worker in workers) or "nobody"


# --- Members: processes that take part, each with a lease that what it sends renews.


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
    session: WorkerSession
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

    def give(self, reply: SessionReply) -> None:
        """Answer the request that is held, by what was asked for."""
        self._waits = None
        self.session.answer(reply)

    def put_off(self, now: float, seconds: float) -> None:
        """Tell it to ask again, if it has been held for so long."""
        if now - self._held >= seconds:
            self.session.answer(SessionReply(Status.WAIT))

    def refuse(self, reason: str) -> None:
        """Answer the request that is held, if there is one."""
        if self.session.held is not None:
            self.give(SessionReply.refused(reason))


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
            f"TF_DGC_TIMEOUT) for {worker_names(others)}, which responds but does not "
            f"come, "
            "and computes nothing"
        )

    def forgive(self, seconds: float) -> None:
        """Let time in which nobody was heard count against no one."""
        for member in self.values():
            member.seen += seconds

    def silent(self, now: float, seconds: float) -> list[Member]:
        """Return those that have not been heard of for so long."""
        return [m for m in self.values() if now - m.seen > seconds]
