"""The service of one run: who joins, which pushes are applied, and all replies."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np

from tf_dgc._versions import tf_dgc_version
from tf_dgc.server import model_spec, validation
from tf_dgc.server.messages import Kind, Push, Status, encode_text, summarize_error
from tf_dgc.server.model import RestoredModel, ServerModel, initial_model
from tf_dgc.server.model_spec import ModelSpec, learning_rate_of
from tf_dgc.server.sessions import (
    Limits,
    Member,
    Members,
    SessionReply,
    StepClock,
    worker_names,
)

_RESTART = "End all workers and the server, and start them again"
_RESTART_OR_CHANGE_MODE = (
    f"{_RESTART}; or use a mode in which the other workers continue without one that "
    'ends or does not join: "async", "ssp" or "backup".'
)


class Service:
    """Trains one model with the pushes of the workers. Times are in seconds."""

    def __init__(
        self,
        num_workers: int,
        shard: tuple[int, int],
        limits: Limits,
        log: Callable[[str], None],
    ):
        self.members = Members(num_workers)
        self.model: ServerModel | None = None
        self.clock: StepClock | None = None
        self.pushes: PendingPushes | None = None
        self.spec: ModelSpec | None = None
        self.failure: str | None = None
        self._num_workers, self._shard = num_workers, shard
        self._limits, self._log = limits, log
        self._restored: RestoredModel | None = None
        self._initializer: Member | None = None  # sends the initial weights
        self._num_words = 0  # of all variables
        self._is_started = False

    def restore(self, restored: RestoredModel) -> None:
        """Resume from a checkpoint once the first worker joins."""
        self._restored = restored

    def max_words(self, kind: Kind) -> int:
        """Return the maximum number of words of a request."""
        return validation.max_words(kind, self._num_words)

    def handle(self, member: Member, kind: Kind, body: np.ndarray, now: float) -> None:
        """Handle a whole request of a member: reply to it now or hold it."""
        if kind == Kind.JOIN:
            self.admit(member, body, now)
        elif kind == Kind.INITIALIZE:
            self._initialize(member, body)
        elif kind == Kind.PULL and self.model is not None:
            words = self.model.full_pull(member.worker)
            member.reply(SessionReply(Status.DONE, words, self.model.clock))
        elif kind in (Kind.START, Kind.POLL, Kind.PUSH):
            member.hold(now)
        else:
            member.refuse(f"a request of kind {kind} is not possible now")

    def admit(self, member: Member, body: np.ndarray, now: float) -> None:
        """Let a process take part, replacing its worker's earlier one, or refuse it."""
        spec: ModelSpec = {}
        try:
            spec = validation.parse_request(body)
            member.num_pushed = max(0, int(spec.pop("steps", 0)))
            error = self._check_spec(spec)
        except Exception as invalid:  # any class, as the text may be anything
            error = f"it cannot be read ({summarize_error(invalid)})"
        if not error and self.spec is None:
            error = self._set_spec(member, spec)
        if error:
            reason = f"because of its model spec: {error}"
            self._log(f"worker {member.worker} is refused {reason}")
            member.refuse(f"The server refuses worker {member.worker} {reason}.")
            self.drop(member, "is refused")
            return
        previous = self.members.get(member.worker)
        if previous is not None and previous is not member:
            self.drop(previous, "is replaced by another process")
        self.members.add(member, now)
        member.learning_rate = learning_rate_of(spec)
        self._join(member)

    def _check_spec(self, spec: ModelSpec) -> str | None:
        error = self._spec_error(spec)
        if error is not None:
            return (
                f"{error}. All workers must run the same version of tf_dgc, with the "
                "same model and settings"
            )
        if self.spec is None and self._restored is not None:
            return self._restored.difference(spec)
        return None

    def _spec_error(self, spec: ModelSpec) -> str | None:
        version = tf_dgc_version()
        if spec["version"] != version:
            return (
                f"version is {spec['version']!r}, and the server's tf_dgc is "
                f"{version!r}"
            )
        if spec["num_workers"] != self._num_workers:
            return (
                f"num_workers is {spec['num_workers']}, and the server's TF_CONFIG "
                f"has {self._num_workers}"
            )
        if spec["shard"] != list(self._shard):
            actual, expected = spec["shard"], self._shard
            return (
                f"it is for server {actual[0]} of {actual[1]}, and according to its "
                f"TF_CONFIG this is server {expected[0]} of {expected[1]}"
            )
        if self.spec is None:
            validation.check_model_spec(spec)
            return None
        # Callbacks may have changed the learning rate once training has begun.
        return model_spec.spec_difference(
            self.spec, spec, compare_learning_rates=self.model is None
        )

    def _set_spec(self, member: Member, spec: ModelSpec) -> str | None:
        """Set the first worker's model spec; return why that is impossible, or None."""
        restored = self._restored
        if restored is not None:
            try:
                self.model = restored.create_model(spec)
            except ValueError as error:
                return str(error)
            if self.model.learning_rate != restored.learning_rate:
                self._log(
                    f"learning rate {self.model.learning_rate:g} instead of "
                    f"{restored.learning_rate:g}, from worker {member.worker}"
                )
        self.spec, self._restored = spec, None
        self._num_words = model_spec.model_words(spec)
        self.clock = StepClock.from_settings(spec["settings"])
        self.pushes = PendingPushes(self.clock, self._log)
        return None

    def _join(self, member: Member) -> None:
        if self._is_started and self.clock:
            self.clock.join(member.worker)
        initializes = self.model is None and self._initializer in (None, member)
        if initializes:
            self._initializer = member
        clock = self.model.clock if self.model else 0
        progress = f"{len(self.members)} of {self._num_workers}"
        progress += f", at update {clock}" if self.model else ""
        self._log(f"worker {member.worker} joins ({progress})")
        fields = {"give": initializes, "clock": clock}
        member.reply(SessionReply(body=encode_text(json.dumps(fields))))

    def _initialize(self, member: Member, words: np.ndarray) -> None:
        if self.spec is None or self._initializer is not member or self.model:
            member.refuse("the server did not ask for initial weights")
            return
        try:
            self.model = initial_model(self.spec, words)
        except ValueError as error:
            self.spec = None
            self._initializer = None
            self.drop(member, f"is refused. {error}")
            return
        self._log(
            f"{self.model.num_words} words of weights, from worker {member.worker}"
        )
        member.reply(SessionReply())

    def push(self, member: Member, push: Push, learning_rate: float) -> str | None:
        """Receive a push; return why it is refused, or None."""
        if self.model is None or self.pushes is None or not member.has_weights:
            return "a push came before the worker asked for the initial weights"
        return self.pushes.add(member, push, learning_rate, self.model)

    def drop(self, member: Member, reason: str, is_finished: bool = False) -> None:
        """Remove a member that left or is lost; the log says its name and `reason`."""
        if self.members.get(member.worker) is not member:
            return
        del self.members[member.worker]
        if is_finished:
            self.members.finished.add(member.worker)
        self._log(
            f"worker {member.worker} {reason} ({member.num_applied} pushes applied)"
        )
        member.refuse(f"worker {member.worker} {reason}")
        if self._initializer is member and self.model is None:
            self._initializer = None
        if self.clock is None:
            return
        self.clock.leave(member.worker)
        if self.model:
            self.model.forget(member.worker)
        if self._needs_all_workers and not is_finished and self.failure is None:
            self.failure = f"worker {member.worker} {reason}"

    @property
    def _needs_all_workers(self) -> bool:
        return self.spec is not None and self.spec["settings"]["mode"] == "sync"

    def advance(self, now: float) -> None:
        """Apply complete steps; call it after every message and periodically."""
        lease = self._limits.lease
        for member in self.members.silent(now, lease):
            self.drop(
                member, f"has not responded for {lease:g} s: killed, stopped or cut off"
            )
        self._start(now)
        if self.model and self.pushes:
            for member, reason in self.pushes.apply(self.model):
                self.drop(member, reason)
        held = (Kind.START, Kind.PUSH, Kind.POLL)
        for member in [m for m in self.members.values() if m.session.pending in held]:
            try:
                self._reply_if_possible(member, now)
            except Exception as error:  # such as lack of memory; the others continue
                self.drop(member, f"cannot be answered: {summarize_error(error)}")
        self.members.record_presence(now)

    def _start(self, now: float) -> None:
        if self._is_started or self.clock is None or self.model is None:
            return
        missing, first_join = self.members.missing, self.members.first_join
        in_time = first_join is None or now - first_join < self._limits.start
        too_few = len(self.members) < (self.clock.quorum or 0)
        if in_time and (too_few or (missing and self.clock.staleness < np.inf)):
            return
        if missing and self._needs_all_workers:
            self.failure = (
                f"{worker_names(missing)} did not join within {self._limits.start:g} s "
                "(environment variable TF_DGC_START_TIMEOUT)"
            )
            return
        self._is_started = True
        for worker in self.members:
            self.clock.join(worker)

    def _reply_if_possible(self, member: Member, now: float) -> None:
        clock = self.clock
        blockers = clock.blockers(member.worker) if clock else []
        timeout = self.members.timeout_error(member, blockers, now, self._limits)
        if self.failure:
            member.refuse(
                f"The run cannot continue: {self.failure}. {_RESTART_OR_CHANGE_MODE}"
            )
        elif self._initializer is None and self.model is None:
            member.reply(SessionReply(Status.REJOIN))
        elif clock and self._is_started and clock.may_continue(member.worker):
            clock.begin_step(member.worker)
            member.has_weights, model = True, cast(ServerModel, self.model)
            pull = model.full_pull if member.needs_full_pull else model.pull
            status = Status.LATE if member.is_late else Status.DONE
            member.reply(SessionReply(status, pull(member.worker), model.clock))
        elif self._is_started and timeout:
            member.refuse(f"{timeout}. {self._timeout_advice(len(blockers))}")
        else:
            member.reply_wait_after(now, self._limits.hold)

    def _timeout_advice(self, num_idle: int) -> str:
        settings = cast(ModelSpec, self.spec)["settings"]
        num_present = len(cast(StepClock, self.clock).workers)
        quorum = f"a `quorum` of at most {num_present - num_idle}"
        if settings["mode"] == "backup":
            return (
                f'{_RESTART}, with {quorum}, or in mode "async", in which no worker '
                f"waits. Received: quorum={settings['quorum']}, with "
                f"{num_present} workers"
            )
        return (
            f"{_RESTART}; or use a mode that does not wait for such a worker: "
            f'"async", or "backup" with {quorum}.'
        )

    def is_over(self, now: float) -> bool:
        """Whether all workers have left in order, or no more will join in time."""
        if self.members or self.members.first_join is None:
            return False
        return (
            self.is_finished
            or self.failure is not None
            or self.members.absent_for(now, self._limits.start)
        )

    @property
    def is_finished(self) -> bool:
        """Whether all workers have left in order."""
        return len(self.members.finished) == self._num_workers

    def summary(self) -> str:
        """Return a line for the log about all pushes."""
        if self.model is None or self.pushes is None:
            return "nothing was trained"
        return self.pushes.summary(self.model)


class PendingPushes:
    """Pushes that have not been applied, with their senders."""

    def __init__(self, clock: StepClock, log: Callable[[str], None]):
        self.num_late = 0
        self._clock, self._log = clock, log
        self._pending: list[tuple[Push, Member]] = []
        self._most_pushed = 0  # by any process

    def add(
        self, member: Member, push: Push, learning_rate: float, model: ServerModel
    ) -> str | None:
        """Add a push; return why it is refused, or None."""
        if push.step > model.clock:
            return (
                f"a push of step {push.step} came at {model.clock}: the server was "
                "restarted from a checkpoint"
            )
        if self._clock.staleness == 0 and push.step != model.clock:
            return f"a push of step {push.step} came, but all are of {model.clock}"
        member.num_pushed += 1
        self._most_pushed = max(self._most_pushed, member.num_pushed)
        self._set_learning_rate(member, learning_rate, model)
        member.is_late = self._clock.quorum is not None and push.step < model.clock
        if member.is_late:
            self.num_late += 1
            return None
        self._pending.append((push, member))
        self._clock.push(member.worker)
        return None

    def _set_learning_rate(
        self, member: Member, learning_rate: float, model: ServerModel
    ) -> None:
        """Set the learning rate if it changed, unless the worker is behind others."""
        # The callbacks of a process that has pushed less than another are at an earlier
        # epoch.
        if (
            math.isnan(learning_rate)
            or learning_rate == member.learning_rate
            or member.num_pushed < self._most_pushed
        ):
            return
        member.learning_rate = learning_rate
        if learning_rate != model.learning_rate:
            model.set_learning_rate(learning_rate)
            self._log(f"learning rate {learning_rate:g}, from worker {member.worker}")

    def apply(self, model: ServerModel) -> Iterator[tuple[Member, str]]:
        """Apply the pushes of complete steps."""
        for step_workers in self._clock.take_steps():
            pushes = [p for p in self._pending if p[0].worker in step_workers]
            self._pending = [
                p for p in self._pending if p[0].worker not in step_workers
            ]
            pushes.sort(key=lambda p: p[0].worker)
            yield from _apply_valid(model, pushes)

    def summary(self, model: ServerModel) -> str:
        """Return a line for the log about all pushes."""
        ages = ", ".join(f"{age}: {n}" for age, n in sorted(model.ages.items()))
        return (
            f"{model.clock} updates; at most {self._clock.max_lead} steps ahead of "
            f"the slowest worker; {self.num_late} pushes came too late; pushes by the "
            f"updates since they were computed: {ages}"
        )


def _apply_valid(
    model: ServerModel, pushes: Sequence[tuple[Push, Member]]
) -> Iterator[tuple[Member, str]]:
    try:
        model.apply([push for push, _ in pushes])
    except Exception as error:  # any class, as a push may be anything
        valid = [len(pushes) > 1 and model.can_read(push) for push, _ in pushes]
        if all(valid):  # only their sum is invalid
            valid = [False] * len(pushes)
        for (_, member), is_valid in zip(pushes, valid, strict=True):
            if not is_valid:
                yield member, f"sent a push that is refused: {summarize_error(error)}"
        if any(valid):
            pairs = zip(pushes, valid, strict=True)
            yield from _apply_valid(model, [p for p, is_valid in pairs if is_valid])
        return
    for _, member in pushes:
        member.num_applied += 1
