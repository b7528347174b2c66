"""The server's process: listens, and serves until all workers have left."""

import contextlib
import hmac
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import numpy as np
import tensorflow as tf

from tf_dgc._internals import rpc
from tf_dgc.multiworker import tf_config
from tf_dgc.server import messages, tasks, validation
from tf_dgc.server.checkpoint import ServerCheckpoint
from tf_dgc.server.messages import (
    REPLY,
    REQUEST,
    InvalidMessageError,
    Kind,
    Push,
    add_frame,
    decode_text,
    frame_refusal,
    read_head,
    remove_frame,
    secret_words,
    summarize_error,
)
from tf_dgc.server.service import Service
from tf_dgc.server.sessions import Limits, Member, WorkerSession
from tf_dgc.server.tasks import Task
from tf_dgc.server.worker import LEFT_RUN

_WAKE_SECONDS = 0.2


def find_worker_task() -> Task | None:
    """Return this worker's task (None while loading); a server serves and ends here."""
    if tf_config.is_loading() and not tasks.is_cluster():
        return None
    task = tasks.find_task()
    if task.worker is None:
        serve_and_exit(task)
    return task


def serve_and_exit(task: Task) -> NoReturn:
    """Serve the workers of a cluster, then end this process."""
    # The transport's destructor would wait for all callers, including stopped
    # processes that read no reply, so the process ends while it still exists.
    _transport = serve(task)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(task: Task) -> rpc.Server:
    """Serve the workers until they left; the caller keeps the transport it returns."""
    limits, log = Limits.from_environment(), _logger(*task.shard)
    checkpoint = ServerCheckpoint.from_environment(log, task.shard)
    try:
        _try_to_bind(task.server)
        transport = rpc.Server(task.server, 2 * task.num_workers)
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise RuntimeError(
            f"tf_dgc: the server cannot listen on {task.server}: {error}"
        ) from error
    log(f"listens on {task.server}, for {task.num_workers} workers")
    if not (task.is_loopback or any(secret_words())):
        log(
            "WARNING: anyone who can reach this address can train the model. Set the "
            f"same {messages.SECRET_VARIABLE} in the environment of all processes."
        )
    loop = ServerLoop(
        transport,
        task.num_workers,
        limits,
        log=log,
        checkpoint=checkpoint,
        shard=task.shard,
    )
    done = threading.Event()
    waker = threading.Thread(target=_wake, args=(transport, done), daemon=True)
    waker.start()
    try:
        loop.run()
    finally:
        done.set()
        waker.join()
    return transport


def _try_to_bind(address: str) -> None:
    """Raise for an unusable address, where TensorFlow waits."""
    # Uses `SO_REUSEADDR` as TensorFlow's servers do: a port that `tf-dgc run` holds is
    # free.
    host, _, port = address.rpartition(":")
    family, kind, *_, location = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(location)


def _wake(transport: rpc.Server, done: threading.Event) -> None:
    """Wake the loop periodically, so that it checks its time limits."""
    while not done.wait(_WAKE_SECONDS):
        transport.wake()


def _logger(index: int, num_servers: int) -> Callable[[str], None]:
    name = "server" if num_servers == 1 else f"server {index} of {num_servers}"

    def log(line: str) -> None:
        print(f"tf_dgc {name}: {line}", flush=True)

    return log


class Transport(Protocol):
    """Receives messages and sends replies; `rpc.Server` is one."""

    def take(self) -> tuple[int, np.ndarray]:
        """Wait for a message or a wake-up; return its slot, -1 for none, and words."""

    def answer(self, slot: int, words: np.ndarray) -> None:
        """Reply to the oldest message of a slot."""


class ServerLoop:
    """Receives messages, rejects malformed ones, and answers each exactly once."""

    # Worker i has two slots: slot i for its steps, and slot N + i for heartbeats, also
    # while a step waits.

    def __init__(
        self,
        transport: Transport,
        num_workers: int,
        limits: Limits,
        secret: str | None = None,
        log: Callable[[str], None] = print,
        now: Callable[[], float] = time.monotonic,
        checkpoint: ServerCheckpoint | None = None,
        shard: tuple[int, int] = (0, 1),
    ):
        self.runs = TrainingRuns(num_workers, shard, limits, log, checkpoint)
        self._transport, self._num_workers = transport, num_workers
        self._newcomers: dict[int, WorkerSession] = {}  # by worker, not yet admitted
        self._secret = np.array(secret_words(secret), "<i4").tobytes()
        self._log, self._now = log, now

    def run(self) -> None:
        """Serve until all runs are over."""
        self.runs.service(0)
        while not self.runs.is_over(self._now()):
            slot, words = self._transport.take()
            begin = self._now()
            if slot >= 0:
                self._receive(slot, words)
            self.runs.advance(self._now())
            # Heartbeats that came meanwhile have not been received yet.
            self.runs.extend_leases(self._now() - begin)
        self.runs.close()

    def _receive(self, slot: int, words: np.ndarray) -> None:
        try:
            head, body = remove_frame(REQUEST, words)
            kind = self._check(slot, head)
        except InvalidMessageError as error:
            worker = slot % self._num_workers
            reason = f"a message in the name of worker {worker} is refused: {error}"
            self._log(reason)
            self._refuse(slot, reason, read_head(words))
            return
        membership = self.runs.find(head)
        if membership is None:
            if kind in (Kind.HEARTBEAT, Kind.LEAVE):
                self._acknowledge(slot, head)
            else:
                self._receive_newcomer(slot, head, body)
            return
        service, member = membership
        member.last_seen = self._now()
        if kind == Kind.LEAVE:
            self.runs.leave(service, member, decode_text(body))
            self._acknowledge(slot, head)
        elif kind == Kind.HEARTBEAT:
            if body.any():
                member.last_busy = self._now()
            self._acknowledge(slot, head)
        else:
            whole = member.session.receive(head, body, service.max_words(kind))
            if whole is not None:
                with self._expel_on_error(member):
                    self._handle(service, member, head, whole)

    def _check(self, slot: int, head: Any) -> Kind:
        if not hmac.compare_digest(head["secret"].tobytes(), self._secret):
            raise InvalidMessageError(
                "its secret differs (environment variable TF_DGC_SECRET)"
            )
        if head["kind"] not in set(map(int, Kind)):
            raise InvalidMessageError(f"its kind, {head['kind']}, is unknown")
        kind = Kind(head["kind"])
        expected = int(head["worker"])
        if kind in (Kind.HEARTBEAT, Kind.LEAVE):
            expected += self._num_workers
        if slot != expected:
            raise InvalidMessageError(f"it says that it is of worker {head['worker']}")
        return kind

    def _handle(
        self, service: Service, member: Member, head: Any, body: np.ndarray
    ) -> None:
        kind = Kind(head["kind"])
        if kind == Kind.PUSH:
            push = Push(body, member.worker, int(head["step"]))
            error = service.push(member, push, float(head["rate"]))
            if error:
                member.refuse(error)
                return
        service.handle(member, kind, body, self._now())

    def _receive_newcomer(self, slot: int, head: Any, body: np.ndarray) -> None:
        """Receive a message of a process that does not take part."""
        if head["kind"] != Kind.JOIN:
            reason = (
                f"The server does not know this process of worker {slot}: the server "
                "dropped it because it did not respond or another process took its "
                "place, or the server was restarted. Start the worker again."
            )
            if int(head["incarnation"]) in self.runs.left:
                reason = LEFT_RUN
            self._refuse(slot, reason, head)
            return
        self._reply_wait(slot)
        session = self._newcomers.get(slot)
        if session is None or session.incarnation != head["incarnation"]:
            session = self._newcomers[slot] = self._create_session(slot, head)
        whole = session.receive(head, body, validation.max_words(Kind.JOIN, 0))
        if whole is not None:
            del self._newcomers[slot]
            member = Member(slot, session, self._now())
            with self._expel_on_error(member):
                self.runs.admit(member, whole, self._now())

    def _create_session(self, slot: int, head: Any) -> WorkerSession:
        def send(words: np.ndarray) -> None:
            self._transport.answer(slot, words)

        return WorkerSession(int(head["incarnation"]), int(head["number"]) - 1, send)

    def _acknowledge(self, slot: int, head: Any) -> None:
        words = add_frame(
            REPLY,
            np.zeros([0], np.int32),
            parts=1,
            incarnation=head["incarnation"],
            number=head["number"],
        )
        self._transport.answer(slot, words)

    def _refuse(self, slot: int, reason: str, head: Any) -> None:
        """Refuse a message of a process that has no session."""
        self._reply_wait(slot)
        self._transport.answer(slot, frame_refusal(head, reason))

    def _reply_wait(self, slot: int) -> None:
        """Let a member that waits in a slot poll; see `WorkerSession.reply_wait`."""
        for _, member in self.runs.memberships(slot):
            member.session.reply_wait()

    @contextlib.contextmanager
    def _expel_on_error(self, member: Member) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = f"cannot continue: {summarize_error(error)}"
            self._log(f"worker {member.worker} {reason}")
            self.runs.expel(member, reason)


class TrainingRuns:
    """Services of the runs of a cluster."""

    # The workers' first `ServerOptimizer`s form run 0, their second ones run 1, and so
    # on. A worker takes part in one run at a time: joining a later one ends its part in
    # earlier ones, in which other workers may still train.

    def __init__(
        self,
        num_workers: int,
        shard: tuple[int, int],
        limits: Limits,
        log: Callable[[str], None],
        checkpoint: ServerCheckpoint | None,
    ):
        self._num_workers, self._shard = num_workers, shard
        self._limits, self._log, self._checkpoint = limits, log, checkpoint
        self._services: dict[int, Service] = {}  # by run, without finished ones
        self._checkpoints: dict[int, ServerCheckpoint] = {}  # by run
        self._joined_runs: set[int] = set()
        self.left: set[int] = set()  # incarnations of processes that have left

    def service(self, run: int) -> Service:
        """Return the service of a run, resumed from its checkpoint if there is one."""
        if run not in self._services:
            log = self._logger(run)
            service = Service(self._num_workers, self._shard, self._limits, log)
            if self._checkpoint is not None:
                self._checkpoints[run] = self._checkpoint.for_run(run, log)
                self._checkpoints[run].restore(service)
            self._services[run] = service
        return self._services[run]

    def __iter__(self) -> Iterator[Service]:
        return iter(list(self._services.values()))

    def _logger(self, run: int) -> Callable[[str], None]:
        if run == 0:
            return self._log
        return lambda line: self._log(f"run {run + 1}: {line}")

    def find(self, head: Any) -> tuple[Service, Member] | None:
        """Return the member that sent a message and its service, or None."""
        for service in self:
            member = service.members.find(head)
            if member is not None:
                return service, member
        return None

    def memberships(self, worker: int) -> list[tuple[int, Member]]:
        """Return the runs in which a worker takes part, with its member."""
        return [
            (run, service.members[worker])
            for run, service in self._services.items()
            if worker in service.members
        ]

    def admit(self, member: Member, body: np.ndarray, now: float) -> None:
        """Let a process take part in the run of its model spec; see `Service.admit`."""
        run = _requested_run(body)
        service = self.service(run)
        try:
            service.admit(member, body, now)
        finally:
            if run and service.spec is None:
                del self._services[run]
        if service.members.get(member.worker) is member:
            self._joined_runs.add(run)
            self._end_other_memberships(run, member.worker)

    def _end_other_memberships(self, run: int, worker: int) -> None:
        for other, member in self.memberships(worker):
            if other < run:
                self._services[other].drop(
                    member, "has left, to begin another run", is_finished=True
                )
                self.left.add(member.session.incarnation)
            elif other > run:  # the worker was restarted
                self._services[other].drop(member, "is replaced by another process")

    def leave(self, service: Service, member: Member, error: str) -> None:
        """Let a member leave."""
        reason = f"ended with {error}" if error else "has left"
        service.drop(member, reason, is_finished=not error)
        self.left.add(member.session.incarnation)

    def expel(self, member: Member, reason: str) -> None:
        """Drop a member from all runs, or refuse a process that is none yet."""
        for service in self:
            service.drop(member, reason)
        member.refuse(f"worker {member.worker} {reason}")

    def advance(self, now: float) -> None:
        """Advance all runs, write checkpoints that are due, and end finished runs."""
        for run, service in list(self._services.items()):
            service.advance(now)
            if run in self._checkpoints:
                self._checkpoints[run].write_if_due(service)
            if service.is_finished:
                self._end(run)

    def extend_leases(self, seconds: float) -> None:
        """Exclude from the leases a time in which the server received no messages."""
        for service in self:
            service.members.extend_leases(seconds)

    def is_over(self, now: float) -> bool:
        """Whether all runs that a worker joined are over."""
        if any(service.members for service in self):
            return False
        joined = [s for run, s in self._services.items() if run in self._joined_runs]
        return bool(self._joined_runs) and all(s.is_over(now) for s in joined)

    def close(self) -> None:
        """End all runs, writing checkpoints of unfinished ones."""
        for run in list(self._services):
            self._end(run)

    def _end(self, run: int) -> None:
        service = self._services.pop(run)
        if run in self._checkpoints:
            self._checkpoints.pop(run).end(service)
        self._logger(run)(service.summary())


def _requested_run(body: np.ndarray) -> int:
    """Return the run of a model spec; run 0, which refuses it, for an invalid one."""
    try:
        run = validation.parse_request(body)["run"]
    except (KeyError, TypeError, ValueError):
        return 0
    return run if isinstance(run, int) and 0 <= run < validation.MAX_RUNS else 0
