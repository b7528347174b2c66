"""Sessions of worker processes, their leases, and the clock that orders their steps."""

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
    encode_text,
    frame_refusal,
    num_parts,
    part_of,
)

_EMPTY = np.zeros([0], np.int32)
_LOST = "a message was lost or is of another process"


@dataclasses.dataclass
class SessionReply:
    """Reply to a request, before it is divided into parts."""

    status: Status = Status.DONE
    body: np.ndarray = dataclasses.field(default_factory=lambda: _EMPTY)  # int32 `[w]`
    clock: int = 0  # number of updates applied to the weights


class WorkerSession:
    """Receives messages of one process; accepts each request once and whole."""

    # A worker that got no reply repeats its request; it gets the same reply. Every
    # message gets exactly one reply, in the order of arrival: a caller that is gone
    # still takes one, which must not be its successor's.

    def __init__(
        self, incarnation: int, number: int, send: Callable[[np.ndarray], None]
    ):
        self.incarnation = incarnation
        self.pending: Kind | None = None
        self._send = send
        self._number = number
        self._last_reply: np.ndarray | None = None
        self._parts: list[np.ndarray] = []
        self._body, self._clock = _EMPTY, 0  # of the reply that is being fetched

    def receive(
        self, head: Any, body: np.ndarray, max_words: int = MAX_WORDS
    ) -> np.ndarray | None:
        """Receive a message; return the body of a request that is complete and new."""
        if head["number"] == self._number:
            self._repeat_reply()
            return None
        if head["number"] != self._number + 1 or self.pending is not None:
            reason = f"request {head['number']} followed {self._number}: {_LOST}"
            self._send(frame_refusal(head, reason))
            return None
        self._number, self._last_reply = int(head["number"]), None
        if head["kind"] == Kind.NEXT_PART:
            self._reply_part(Status.DONE, int(head["part"]))
            return None
        if refusal := self._check_part(head, body, max_words):
            self._send(frame_refusal(head, refusal))
            return None
        self._parts.append(body)
        if head["part"] + 1 < head["parts"]:
            self._reply_words(Status.DONE, _EMPTY, 0)
            return None
        whole = np.concatenate(self._parts)
        self._parts, self.pending = [], Kind(head["kind"])
        return whole

    def _check_part(self, head: Any, body: np.ndarray, max_words: int) -> str | None:
        if head["part"] not in (0, len(self._parts)):
            return f"part {head['part']} came out of order: {_LOST}"
        if head["part"] == 0:
            self._parts = []
        if sum(map(len, self._parts)) + len(body) > max_words:
            self._parts = []
            return f"a request of more than {max_words} words came"
        return None

    def reply(self, reply: SessionReply) -> None:
        """Reply to the pending request."""
        self.pending = None
        self._body, self._clock = reply.body, reply.clock
        self._reply_part(reply.status, 0)

    def reply_wait(self) -> None:
        """Let the worker poll, if a request is pending."""
        # Necessary before a reply to another caller in the same slot, which the pending
        # caller, whose message is older, would receive instead.
        if self.pending is not None:
            self.reply(SessionReply(Status.WAIT))

    def _reply_part(self, status: Status, part: int) -> None:
        """Reply with a part of the body, which is deleted after its last part."""
        body, clock, parts = self._body, self._clock, num_parts(len(self._body))
        if part + 1 >= parts:
            self._body, self._clock = _EMPTY, 0
        self._reply_words(status, part_of(body, part), clock, part, parts)

    def _repeat_reply(self) -> None:
        if self._last_reply is None:
            self._send(self._frame(Status.WAIT, _EMPTY, 0, 0, 1))
        else:
            self._send(self._last_reply)

    def _reply_words(
        self,
        status: Status,
        words: np.ndarray,
        clock: int,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self._last_reply = self._frame(status, words, clock, part, parts)
        self._send(self._last_reply)

    def _frame(
        self, status: Status, words: np.ndarray, clock: int, part: int, parts: int
    ) -> np.ndarray:
        return add_frame(
            REPLY,
            words,
            status=status,
            incarnation=self.incarnation,
            number=self._number,
            clock=clock,
            part=part,
            parts=parts,
        )


class StepClock:
    """Decides which pushes form a step, and which workers may continue."""

    # A worker is at most `staleness` completed steps ahead of the slowest: with 0 each
    # worker's next pushes form one step, with infinity none waits. With a `quorum`,
    # that many pushes of the same weights form a step, or all if fewer workers take
    # part.

    def __init__(self, staleness: float, quorum: int | None = None):
        self.staleness, self.quorum = staleness, quorum
        self.completed: dict[int, int] = {}
        self.max_lead = 0
        self._pending: list[int] = []

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "StepClock":
        """Return the clock of the settings "mode", "staleness" and "quorum"."""
        arguments = {
            "sync": (0, None),
            "async": (math.inf, None),
            "ssp": (settings["staleness"], None),
            "backup": (math.inf, settings["quorum"]),
        }
        if settings["mode"] not in arguments:
            raise ValueError(f"there is no mode {settings['mode']!r}")
        return cls(*arguments[settings["mode"]])

    @property
    def workers(self) -> list[int]:
        """Workers that take part, ascending."""
        return sorted(self.completed)

    def join(self, worker: int) -> None:
        """Add a worker, level with the slowest; a pending push is its next one."""
        slowest = min(self.completed.values(), default=0)
        self.completed[worker] = slowest + (worker in self._pending)

    def leave(self, worker: int) -> None:
        """Remove a worker; its pending push counts."""
        self.completed.pop(worker, None)

    def push(self, worker: int) -> None:
        """Count a push."""
        self.completed[worker] += 1
        self._pending.append(worker)

    def take_steps(self) -> list[list[int]]:
        """Return the workers of each step that is complete, and remove their pushes."""
        if self.quorum is None and self.staleness > 0:
            steps = [[worker] for worker in self._pending]
        elif self._pending and self._is_complete():
            steps = [sorted(self._pending)]
        else:
            return []
        self._pending = []
        return steps

    def _is_complete(self) -> bool:
        if self.quorum is None:
            return not set(self.completed) - set(self._pending)
        return len(self._pending) >= min(self.quorum, len(self.completed))

    def may_continue(self, worker: int) -> bool:
        """Whether a worker may begin its next step."""
        return worker not in self._pending and self._lead(worker) <= self.staleness

    def begin_step(self, worker: int) -> None:
        """Record that a worker begins its next step."""
        self.max_lead = max(self.max_lead, self._lead(worker))

    def blockers(self, worker: int) -> list[int]:
        """Return the workers that a worker waits for, ascending."""
        if self.may_continue(worker):
            return []
        if worker in self._pending:
            return sorted(set(self.completed) - set(self._pending))
        required = self.completed[worker] - self.staleness
        return sorted(w for w, done in self.completed.items() if done < required)

    def _lead(self, worker: int) -> int:
        return self.completed.get(worker, 0) - min(self.completed.values(), default=0)


def worker_names(workers: Iterable[int]) -> str:
    """Return the names of workers in errors."""
    return " and ".join(f"worker {worker}" for worker in workers) or "nobody"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Time limits of the server, in seconds."""

    lease: float  # time without a message after which a worker counts as gone
    start: float  # for all workers to join; for another after the last was lost
    wait: float  # time that a worker waits for others that are alive and idle
    work: float  # time that a worker waits for others that compute something else
    hold: float = 1.0  # time after which a waiting worker is told to poll

    @classmethod
    def from_environment(cls) -> "Limits":
        """Return the limits of the environment variables `TF_DGC_*`."""
        return cls(
            workers.heartbeat_timeout_seconds(),
            workers.start_timeout_seconds(),
            workers.timeout_seconds(),
            workers.tracing_timeout_seconds(),
        )


@dataclasses.dataclass
class Member:
    """A worker process that takes part in a run. Times are in seconds."""

    worker: int
    session: WorkerSession
    last_seen: float = dataclasses.field(default_factory=time.monotonic)
    last_busy: float = -math.inf  # time at which it was last known to compute
    learning_rate: float | None = None  # last applied; None: schedule
    num_pushed: int = 0
    num_applied: int = 0
    is_late: bool = False
    needs_full_pull: bool = True  # whether the pending request is for all weights
    has_weights: bool = False  # whether it has received all weights, and may push
    _held_since: float = 0.0
    _waiting_since: float | None = None

    def hold(self, now: float) -> None:
        """Hold its pending request, for a later reply."""
        self._held_since = now
        if self.session.pending != Kind.POLL:
            self.needs_full_pull = self.session.pending == Kind.START
        if self._waiting_since is None:
            self._waiting_since = now

    def has_timed_out(
        self, now: float, others: Iterable["Member"], limits: Limits
    ) -> bool:
        """Whether it has waited too long, over any number of polls."""
        if self._waiting_since is None:
            return False
        last_busy = max((other.last_busy for other in others), default=-math.inf)
        idle = now - max(self._waiting_since, last_busy)
        return idle > limits.wait or now - self._waiting_since > limits.work

    def reply(self, reply: SessionReply) -> None:
        """Reply to its pending request."""
        self._waiting_since = None
        self.session.reply(reply)

    def reply_wait_after(self, now: float, seconds: float) -> None:
        """Let it poll, if its request has been held for `seconds`."""
        if now - self._held_since >= seconds:
            self.session.reply(SessionReply(Status.WAIT))

    def refuse(self, reason: str) -> None:
        """Refuse its pending request, if there is one."""
        if self.session.pending is not None:
            self.reply(SessionReply(Status.REFUSED, encode_text(reason)))


class Members(dict[int, Member]):
    """Members of a run that are present, by worker."""

    def __init__(self, num_workers: int):
        super().__init__()
        self.first_join: float | None = None
        self.finished: set[int] = set()
        self._num_workers = num_workers
        self._last_present = 0.0

    def add(self, member: Member, now: float) -> None:
        """Add a member."""
        self.first_join = now if self.first_join is None else self.first_join
        self.finished.discard(member.worker)
        self[member.worker] = member

    @property
    def missing(self) -> list[int]:
        """Workers without a member, ascending."""
        return sorted(set(range(self._num_workers)) - set(self))

    def record_presence(self, now: float) -> None:
        """Record the time if there are members."""
        if self:
            self._last_present = now

    def absent_for(self, now: float, seconds: float) -> bool:
        """Whether there has been no member for more than `seconds`."""
        return not self and now - self._last_present > seconds

    def find(self, head: Any) -> Member | None:
        """Return the member that sent a message, or None."""
        member = self.get(int(head["worker"]))
        if member is None or member.session.incarnation != head["incarnation"]:
            return None
        return member

    def timeout_error(
        self, member: Member, others: Sequence[int], now: float, limits: Limits
    ) -> str | None:
        """Return an error for a member that has waited too long, else None."""
        present = [self[i] for i in others if i in self]
        if not member.has_timed_out(now, present, limits):
            return None
        return (
            f"worker {member.worker} waited {limits.wait:g} s (environment variable "
            f"TF_DGC_TIMEOUT) for {worker_names(others)}, which responds but neither "
            "pushes nor computes"
        )

    def extend_leases(self, seconds: float) -> None:
        """Exclude from the leases a time in which the server received no messages."""
        for member in self.values():
            member.last_seen += seconds

    def silent(self, now: float, seconds: float) -> list[Member]:
        """Return the members without a message for more than `seconds`."""
        return [m for m in self.values() if now - m.last_seen > seconds]
