"""The server's process: listens where it is told, and serves until all have left."""

import contextlib
import hmac
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
    DamagedError,
    Kind,
    Push,
    Status,
    add_frame,
    brief,
    head_of,
    remove_frame,
    secret_words,
    to_body,
    to_text,
)
from tf_dgc.server.service import Admission, Service
from tf_dgc.server.sessions import Limits, Member, WorkerSession
from tf_dgc.server.tasks import Task
from tf_dgc.server.worker import LEFT_RUN

# --- Runs: what workers train one after the other, each with a service of its own.


class TrainingRuns:
    """Serves what workers train with the first `ServerOptimizer` of their processes.

    And with the second, and so on. A worker takes part in one run at a time: that it
    joins a later one ends its part in those before, in which others may still be.

    Args:
        num_workers: number of workers, N.
        shard: index of this server, and number of servers.
        limits: seconds that are waited.
        say: function that is given lines of the log.
        saved: checkpoint of the first run, and where those of others are; or None.
    """

    def __init__(
        self,
        num_workers: int,
        shard: tuple[int, int],
        limits: Limits,
        say: Callable[[str], None],
        saved: ServerCheckpoint | None,
    ):
        self._cluster = num_workers, shard
        self._limits, self._say, self._saved = limits, say, saved
        self._services: dict[int, Service] = {}  # by run, but for those that are done
        self._files: dict[int, ServerCheckpoint] = {}
        self._begun: set[int] = set()
        self._left: set[int] = set()  # incarnations that take part no longer

    def service(self, run: int) -> Service:
        """Return what serves a run; it goes on from its checkpoint, if there is one.

        Args:
            run: number of the run, from 0.

        Raises:
            RuntimeError: if the checkpoint cannot be read.
        """
        if run not in self._services:
            say = _named(self._say, run)
            service = Service(Admission(*self._cluster), self._limits, say)
            if self._saved is not None:
                self._files[run] = self._saved.of_run(run, say)
                self._files[run].restore(service)
            self._services[run] = service
        return self._services[run]

    def __iter__(self) -> Iterator[Service]:
        return iter(list(self._services.values()))

    # --- members --------------------------------------------------------------------

    def find(self, head: Any) -> tuple[Service, Member] | None:
        """Return the member that a message is from, and its service; or None."""
        found = ((s, s.members.find(head)) for s in self)
        return next(((s, member) for s, member in found if member is not None), None)

    def of_worker(self, worker: int) -> Iterable[tuple[int, Member]]:
        """Return the run that a worker takes part in, and its member; in a list."""
        pairs = list(self._services.items())
        return [(run, s.members[worker]) for run, s in pairs if worker in s.members]

    def admit(self, member: Member, body: np.ndarray, now: float) -> None:
        """Let a process take part in the run that it names, as `Service.admit` does."""
        run = _run_of(body)
        service = self.service(run)
        try:
            service.admit(member, body, now)
        finally:
            if run and service.handed is None:  # the first one stays
                del self._services[run]
        if service.members.get(member.worker) is member:
            self._begun.add(run)
            self._end_others(run, member.worker)

    def _end_others(self, run: int, worker: int) -> None:
        """End a worker's part in other runs; its process has come to this one.

        One that comes to an earlier run is another process, which was started again.
        """
        for other, member in self.of_worker(worker):
            if other < run:
                reason = "has left, to begin another run"
                self._services[other].drop(member, reason, orderly=True)
                self._left.add(member.session.incarnation)
            elif other > run:
                self._services[other].drop(member, "is replaced by another process")

    def leave(self, service: Service, member: Member, reason: str) -> None:
        """Let a process leave, in order or with an error.

        Args:
            service: service that it takes part in.
            member: member that leaves.
            reason: error that ends the process; "" for none.
        """
        said = f"ended with {reason}" if reason else "has left"
        service.drop(member, said, orderly=not reason)
        self._left.add(member.session.incarnation)

    def expel(self, member: Member, reason: str) -> None:
        """Let a process take part no longer, or not begin to; the others go on.

        Args:
            member: member that it is, or was to be.
            reason: reason, behind its name.
        """
        for service in self:
            service.drop(member, reason)
        member.refuse(f"worker {member.worker} {reason}")

    def has_left(self, incarnation: int) -> bool:
        """Whether this process's optimizer took part, and has left."""
        return incarnation in self._left

    # --- after every message, and from time to time ---------------------------------

    def settle(self, now: float) -> None:
        """Do what is due by now; forget the runs that are done.

        Args:
            now: time, in seconds.
        """
        for run, service in list(self._services.items()):
            service.settle(now)
            if run in self._files:
                self._files[run].write_if_due(service)
            if service.is_done:
                self._end(run)

    def forgive(self, seconds: float) -> None:
        """Let time in which nobody was heard count against no one."""
        for service in self:
            service.members.forgive(seconds)

    def is_over(self, now: float) -> bool:
        """Whether all that were begun are over, and nobody takes part in any.

        Args:
            now: time, in seconds.
        """
        if any(service.members for service in self):
            return False
        going = [s for run, s in self._services.items() if run in self._begun]
        return bool(self._begun) and all(service.is_over(now) for service in going)

    def end(self) -> None:
        """End what is left, with the checkpoints of what is not done."""
        for run in list(self._services):
            self._end(run)

    def _end(self, run: int) -> None:
        service = self._services.pop(run)
        if run in self._files:
            self._files.pop(run).end(service)
        _named(self._say, run)(service.summary())


def _named(say: Callable[[str], None], run: int) -> Callable[[str], None]:
    """Return what prints lines of a run's log, which name all but the first one."""
    return (lambda line: say(f"run {run + 1}: {line}")) if run else say


def _run_of(body: np.ndarray) -> int:
    """Return the run that a process names; the first one, which refuses it, if none."""
    try:
        run = validation.parse_request(body)["run"]
    except (KeyError, TypeError, ValueError):
        return 0
    return run if isinstance(run, int) and 0 <= run < validation.MAX_RUNS else 0


# --- The server's loop: takes messages, refuses what is none, and answers each once.


class Transport(Protocol):
    """What takes messages and returns replies, as `rpc.Server` does."""

    def take(self) -> tuple[int, np.ndarray]:
        """Wait for a message, or for anything else; return slot, or -1, and words."""

    def answer(self, slot: int, words: np.ndarray) -> None:
        """Return words to the oldest message of a slot."""


class ServerLoop:
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
        saved: ServerCheckpoint | None = None,
        shard: tuple[int, int] = (0, 1),
    ):
        self.runs = TrainingRuns(num_workers, shard, limits, say, saved)
        self._transport, self._num_workers = transport, num_workers
        self._newcomers: dict[int, WorkerSession] = {}  # by worker; not yet let in
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
            head, body = remove_frame(REQUEST, words)
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
        self._transport.answer(
            slot, add_frame(REPLY, to_body(reason), parts=1, **fields)
        )

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
        self._transport.answer(
            slot, add_frame(REPLY, nothing, parts=1, **_address(head))
        )

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
                reason = LEFT_RUN
            self._refuse(slot, reason, head)
            return
        self._make_way(slot)
        session = self._newcomers.get(slot)
        if session is None or session.incarnation != head["incarnation"]:
            session = self._newcomers[slot] = self._session(slot, head)
        whole = session.take(head, body, validation.max_words(Kind.JOIN, 0))
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

    def _session(self, slot: int, head: Any) -> WorkerSession:
        def send(words: np.ndarray) -> None:
            self._transport.answer(slot, words)

        return WorkerSession(int(head["incarnation"]), int(head["number"]) - 1, send)


def _address(head: Any) -> dict[str, Any]:
    """Return the fields of a reply to a message, by which its sender knows it."""
    return {name: head[name] for name in ("incarnation", "number")}


_WAKE_SECONDS = 0.2


def find_task() -> Task | None:
    """Return this process's task; serve, if it is the server, and end the process.

    None outside of a cluster, while a saved model is loaded.
    """
    if tf_config.is_loading() and not tasks.is_cluster():
        return None
    task = tasks.find_task()
    if task.worker is None:
        listened = serve(task)
        leave_server(listened)
    return task


def leave_server(listened: rpc.Server) -> NoReturn:
    """End this process, in order, while what listened still exists.

    Whoever destroys that waits for all who called, also for a process that was stopped
    and reads no reply.

    Args:
        listened: result of `serve`.
    """
    del listened  # a caller has it too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def serve(task: Task) -> rpc.Server:
    """Serve the workers of a cluster, and return when they have left.

    Args:
        task: this process's task, a server.

    Returns:
        What listened; see `leave`.

    Raises:
        RuntimeError: if it cannot listen on its address, write its checkpoint, or go
            on from it.
        ValueError: for an environment variable that is not a number of seconds.
    """
    limits, say = Limits.of_environment(), _speaker(*task.shard)
    saved = ServerCheckpoint.of_environment(say, task.shard)
    try:
        _try_to_bind(task.server)
        transport = rpc.Server(task.server, 2 * task.num_workers)
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise RuntimeError(
            f"tf_dgc: the server cannot listen on {task.server}: {error}"
        ) from error
    say(f"listens on {task.server}, for {task.num_workers} workers")
    if not (task.is_loopback or any(messages.secret_words())):
        say(
            "WARNING: whoever reaches this address can train the model. Set the same "
            f"{messages.SECRET_VARIABLE} for all processes (docs/server.md)."
        )
    given = transport, task.num_workers, limits
    loop = ServerLoop(*given, say=say, saved=saved, shard=task.shard)
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
    """Raise `OSError` or `ValueError` if nobody can listen there, as TensorFlow waits.

    As its servers do, with `SO_REUSEADDR`: a port that `tf-dgc run` holds is free.
    """
    host, _, port = address.rpartition(":")
    family, kind, *_, place = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(place)


def _wake(transport: rpc.Server, done: threading.Event) -> None:
    """Let the loop look at the time, again and again."""
    while not done.wait(_WAKE_SECONDS):
        transport.wake()


def _speaker(index: int, number: int) -> Callable[[str], None]:
    """Return what prints lines of the log."""
    name = "server" if number == 1 else f"server {index} of {number}"

    def say(line: str) -> None:
        print(f"tf_dgc {name}: {line}", flush=True)

    return say
