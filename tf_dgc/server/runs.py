"""Runs: what workers train one after the other, each with a service of its own."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tf_dgc.server import checking
from tf_dgc.server.admission import Admission
from tf_dgc.server.members import Limits, Member
from tf_dgc.server.saved import Saved
from tf_dgc.server.service import Service


class Runs:
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
        saved: Saved | None,
    ):
        self._cluster = num_workers, shard
        self._limits, self._say, self._saved = limits, say, saved
        self._services: dict[int, Service] = {}  # by run, but for those that are done
        self._files: dict[int, Saved] = {}
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
        run = checking.read(body)["run"]
    except (KeyError, TypeError, ValueError):
        return 0
    return run if isinstance(run, int) and 0 <= run < checking.MOST_RUNS else 0
