"""What requests do: who joins, what is applied when, and who is told what."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from tf_dgc._versions import tf_dgc_version
from tf_dgc.server import model_spec, validation
from tf_dgc.server.messages import Kind, Push, Status, brief, to_body
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

# --- Admission: who may take part. All must hand over the same.

_SAME = (
    "All workers must run the same version of tf_dgc, with the same model and settings"
)


class Admission:
    """Compares what workers hand over.

    Args:
        num_workers: number of workers, N.
        shard: index of this server, and number of servers.

    Attributes:
        num_workers: number of workers, N.
        handed: description that the first worker handed over; None before it has.
        restored: checkpoint that the first worker is to go on from; None for none.
    """

    def __init__(self, num_workers: int, shard: tuple[int, int] = (0, 1)):
        self.handed: ModelSpec | None = None
        self.restored: RestoredModel | None = None
        self.num_workers, self._shard = num_workers, shard

    def read(self, body: np.ndarray, late: bool) -> tuple[Any, int, str | None]:
        """Return what a worker hands over, its steps, and why it cannot be, or None.

        Args:
            body: words of it, int32 `[w]`.
            late: whether others have begun; then a learning rate may be another one, as
                callbacks change it.
        """
        handed = None
        try:
            handed = validation.parse_request(body)
            steps = max(0, int(handed.pop("steps", 0)))
            return handed, steps, self._why_not(handed, late)
        except Exception as error:  # it may be anything
            return handed, 0, f"it cannot be read ({brief(error)})"

    def _why_not(self, handed: ModelSpec, late: bool) -> str | None:
        different = self._differs(handed, late)
        if different is not None:
            return f"{different}. {_SAME}"
        if self.handed is None and self.restored is not None:
            return self.restored.difference(handed)
        return None

    def _differs(self, handed: ModelSpec, late: bool) -> str | None:
        version = tf_dgc_version()
        if handed["version"] != version:
            return (
                f"version is {handed['version']!r}, and the server is tf_dgc "
                f"{version!r}"
            )
        if handed["num_workers"] != self.num_workers:
            return (
                f"num_workers is {handed['num_workers']}, and the server's TF_CONFIG "
                f"names {self.num_workers}"
            )
        if handed["shard"] != list(self._shard):
            here, there = self._shard, handed["shard"]
            return (
                f"it is for server {there[0]} of {there[1]}, and by its own TF_CONFIG "
                f"this one is server {here[0]} of {here[1]}"
            )
        if self.handed is None:
            validation.check_model_spec(handed)
            return None
        return model_spec.spec_difference(self.handed, handed, rates=not late)


# --- Pushes that came: which are in time, which learning rate counts, what is applied.


class PendingPushes:
    """Pushes that have not been applied, and who they are from.

    Args:
        clock: clock that says which are due.
        say: function that is given lines of the log.

    Attributes:
        late: number of those that came when their step had been taken.
    """

    def __init__(self, clock: StepClock, say: Callable[[str], None]):
        self.late = 0
        self._clock, self._say = clock, say
        self._waiting: list[tuple[Push, Member]] = []
        self._most = 0  # pushes of any process

    def take(
        self, member: Member, push: Push, rate: float, model: ServerModel
    ) -> str | None:
        """Take a push; return why there is no place for it, or None.

        Args:
            member: member that it is from.
            push: push.
            rate: learning rate of the worker, NaN if it has a schedule.
            model: model that it is for.
        """
        if push.step > model.clock:
            return (
                f"a push of step {push.step} came at {model.clock}: the server was "
                "started again, from a checkpoint"
            )
        if self._clock.staleness == 0 and push.step != model.clock:
            return f"a push of step {push.step} came where all are of {model.clock}"
        member.pushed += 1
        self._most = max(self._most, member.pushed)
        self._set_rate(member, rate, model)
        member.late = self._clock.quorum is not None and push.step < model.clock
        if member.late:
            self.late += 1
            return None
        self._waiting.append((push, member))
        self._clock.push(member.worker)
        return None

    def _set_rate(self, member: Member, rate: float, model: ServerModel) -> None:
        """Set the learning rate, if it changed on a worker that is not late.

        A process that has pushed less than another one has, or had, is: its callbacks
        are at an earlier epoch. What it changes counts when it has come as far.
        """
        if math.isnan(rate) or rate == member.rate or member.pushed < self._most:
            return
        member.rate = rate
        if rate != model.rate:
            model.set_rate(rate)
            self._say(f"learning rate {rate:g}, by worker {member.worker}")

    def apply(self, model: ServerModel) -> Iterator[tuple[Member, str]]:
        """Apply what is due; yield who pushed what cannot be applied, and why."""
        for group in self._clock.due():
            found = [p for p in self._waiting if p[0].worker in group]
            self._waiting = [p for p in self._waiting if p[0].worker not in group]
            found.sort(key=lambda p: p[0].worker)
            yield from _apply(model, found)

    def summary(self, model: ServerModel) -> str:
        """Return what has been done, as a line of the log.

        Args:
            model: model that it was done to.
        """
        ages = ", ".join(f"{age}: {n}" for age, n in sorted(model.ages.items()))
        return (
            f"{model.clock} updates; at most {self._clock.most_ahead} steps ahead of "
            f"the slowest worker; {self.late} pushes came too late; pushes by the "
            f"updates since they were computed: {ages}"
        )


def _apply(
    model: ServerModel, found: Sequence[tuple[Push, Member]]
) -> Iterator[tuple[Member, str]]:
    """Take a step; yield whose push cannot be read, and take it without that one."""
    try:
        model.apply([push for push, _ in found])
    except Exception as error:  # whatever it brought about
        sound = [len(found) > 1 and model.can_read(push) for push, _ in found]
        if all(sound):  # it is their sum
            sound = [False] * len(found)
        for (_, member), fine in zip(found, sound, strict=True):
            if not fine:
                yield member, f"what it pushed is refused: {brief(error)}"
        if any(sound):
            rest = zip(found, sound, strict=True)
            yield from _apply(model, [pair for pair, fine in rest if fine])
        return
    for _, member in found:
        member.pushes += 1


class Service:
    """Serves one model to workers.

    Args:
        admission: whom to let in.
        limits: seconds that are waited.
        say: function that is given lines of the log.

    Attributes:
        members: processes that take part.
        model: model; None until the first weights are there.
        clock: clock; None until the first worker has joined.
        pushes: pushes that came, likewise.
        failure: reason for which nobody can go on, or None.
    """

    def __init__(
        self, admission: Admission, limits: Limits, say: Callable[[str], None]
    ):
        self.members = Members(admission.num_workers)
        self.model: ServerModel | None = None
        self.clock: StepClock | None = None
        self.pushes: PendingPushes | None = None
        self.failure: str | None = None
        self._admission, self._limits, self._say = admission, limits, say
        self._num_workers = admission.num_workers
        self._giver: Member | None = None
        self._num_words = 0  # of all variables
        self._started = False

    def do(self, member: Member, kind: Kind, body: np.ndarray, now: float) -> None:
        """Do what a request asks for; answer it now or hold it.

        Args:
            member: member whose session holds it.
            kind: kind of the request.
            body: body of it, whole.
            now: time, in seconds.
        """
        if kind == Kind.JOIN:
            self.admit(member, body, now)
        elif kind == Kind.GIVE:
            self._take_weights(member, body)
        elif kind == Kind.PULL and self.model is not None:
            body = self.model.whole(member.worker)
            member.give(SessionReply(Status.DONE, body, self.model.clock))
        elif kind in (Kind.START, Kind.ASK, Kind.PUSH):
            member.hold(now)
        else:
            member.refuse(f"a request of kind {kind} has no place here")

    def most_words(self, kind: Kind) -> int:
        """Return how many words a request of some kind may have."""
        return validation.max_words(kind, self._num_words)

    # --- joining --------------------------------------------------------------------

    def admit(self, member: Member, body: np.ndarray, now: float) -> None:
        """Let a process take part, in place of another one of its worker; or refuse it.

        Args:
            member: member that it is to be, whose session holds that it joins.
            body: words of what it hands over, int32 `[w]`.
            now: time, in seconds.
        """
        late = self.model is not None
        handed, member.pushed, wrong = self._admission.read(body, late)
        if not wrong and self._admission.handed is None:
            wrong = self._take(member, handed)
        if wrong:
            reason = f"what it is to be trained with: {wrong}"
            self._say(f"worker {member.worker} is refused, by {reason}")
            member.refuse(f"The server refuses worker {member.worker}, by {reason}.")
            self.drop(member, "is refused")
            return
        before = self.members.get(member.worker)
        if before is not None and before is not member:
            self.drop(before, "is replaced by another process")
        self.members.come(member, now)
        member.rate = learning_rate_of(handed)
        self._join(member)

    def _take(self, member: Member, handed: ModelSpec) -> str | None:
        """Be what the first worker hands over; return why that cannot be, or None."""
        restored = self._admission.restored
        if restored is not None:
            try:
                self.model = restored.model(handed)
            except ValueError as error:
                return str(error)
            if self.model.rate != restored.rate:
                both = f"{self.model.rate:g}, in place of {restored.rate:g}"
                self._say(f"learning rate {both}, by worker {member.worker}")
        self._admission.handed, self._admission.restored = handed, None
        self._num_words = model_spec.model_words(handed)
        self.clock = StepClock.of_settings(handed["settings"])
        self.pushes = PendingPushes(self.clock, self._say)
        return None

    def restore(self, restored: RestoredModel) -> None:
        """Go on from a checkpoint when the first worker has joined.

        Args:
            restored: content of the checkpoint.
        """
        self._admission.restored = restored

    def _join(self, member: Member) -> None:
        if self._started and self.clock:
            self.clock.join(member.worker)
        gives = self.model is None and self._giver in (None, member)
        if gives:
            self._giver = member
        clock = self.model.clock if self.model else 0
        there = f"{len(self.members)} of {self._num_workers}"
        there += f", at update {clock}" if self.model else ""
        self._say(f"worker {member.worker} joins ({there})")
        told = {"give": gives, "clock": clock}
        member.give(SessionReply(body=to_body(json.dumps(told))))

    def _take_weights(self, member: Member, body: np.ndarray) -> None:
        handed = self._admission.handed
        if handed is None or self._giver is not member or self.model:
            member.refuse("nobody asked for weights")
            return
        try:
            model = initial_model(handed, body)
        except ValueError as error:
            self._admission.handed = self._giver = None
            self.drop(member, f"is refused. {error}")
            return
        self.model = model
        self._say(f"{model.num_words} words of weights, of worker {member.worker}")
        member.give(SessionReply())

    # --- pushes ---------------------------------------------------------------------

    def push(self, member: Member, push: Push, rate: float) -> str | None:
        """Take a push; return why there is no place for it, or None.

        Args:
            member: member that it is from.
            push: push.
            rate: learning rate of the worker, NaN if it has a schedule.
        """
        if self.model is None or self.pushes is None or not member.begun:
            return "a push came before the first weights were asked for"
        return self.pushes.take(member, push, rate, self.model)

    # --- leaving --------------------------------------------------------------------

    def drop(self, member: Member, reason: str, orderly: bool = False) -> None:
        """Let a member take part no longer.

        Args:
            member: member that is gone, or is to go.
            reason: reason, behind its name.
            orderly: whether it had done its part.
        """
        if self.members.get(member.worker) is not member:
            return
        del self.members[member.worker]
        if orderly:
            self.members.done.add(member.worker)
        self._say(f"worker {member.worker} {reason} ({member.pushes} pushes applied)")
        member.refuse(f"worker {member.worker} {reason}")
        if self._giver is member and self.model is None:
            self._giver = None
        if self.clock is None:
            return
        self.clock.leave(member.worker)
        if self.model:
            self.model.forget(member.worker)
        if self._is_strict and not orderly and self.failure is None:
            self.failure = f"worker {member.worker} {reason}"

    @property
    def _is_strict(self) -> bool:
        return self.handed is not None and self.handed["settings"]["mode"] == "sync"

    # --- after every message, and from time to time ---------------------------------

    def settle(self, now: float) -> None:
        """Do what is due by now, and answer who waits for it.

        Args:
            now: time, in seconds.
        """
        for member in self.members.silent(now, self._limits.lease):
            seconds = self._limits.lease
            self.drop(
                member,
                f"does not respond, for {seconds:g} s: killed, stopped or cut off",
            )
        self._start(now)
        if self.model and self.pushes:
            for member, reason in self.pushes.apply(self.model):
                self.drop(member, reason)
        for member in [m for m in self.members.values() if m.waits]:
            try:
                self._settle(member, now)
            except Exception as error:  # as for want of memory; the others go on
                self.drop(member, f"cannot be answered: {brief(error)}")
        self.members.note(now)

    def _start(self, now: float) -> None:
        if self._started or self.clock is None or self.model is None:
            return
        missing, begun = self.members.missing, self.members.begun
        in_time = begun is None or now - begun < self._limits.start
        too_few = len(self.members) < (self.clock.quorum or 0)
        if in_time and (too_few or (missing and self.clock.staleness < np.inf)):
            return
        if missing and self._is_strict:
            self.failure = (
                f"{worker_names(missing)} did not come within {self._limits.start:g} s "
                "(environment variable TF_DGC_START_TIMEOUT)"
            )
            return
        self._started = True
        for worker in self.members:
            self.clock.join(worker)

    def _settle(self, member: Member, now: float) -> None:
        """Answer who waits, if there is something to say."""
        clock = self.clock
        others = clock.waited_for(member.worker) if clock else []
        in_vain = self.members.in_vain(member, others, now, self._limits)
        if self.failure:
            member.refuse(f"The run cannot go on: {self.failure}. {_WITHOUT_ONE}")
        elif self._giver is None and self.model is None:
            member.give(SessionReply(Status.AGAIN))
        elif clock and self._started and clock.may_go_on(member.worker):
            clock.go_on(member.worker)
            member.begun, model = True, cast(ServerModel, self.model)
            pull = model.whole if member.whole else model.pull
            status = Status.LATE if member.late else Status.DONE
            member.give(SessionReply(status, pull(member.worker), model.clock))
        elif self._started and in_vain:
            member.refuse(f"{in_vain}. {self._advice(len(others))}")
        else:
            member.put_off(now, self._limits.hold)

    def _advice(self, idle: int) -> str:
        """Return what helps if some workers live and push nothing.

        Args:
            idle: number of those workers.
        """
        settings, clock = (
            cast(ModelSpec, self.handed)["settings"],
            cast(StepClock, self.clock),
        )
        quorum = f"a `quorum` of at most {len(clock.workers) - idle}"
        if settings["mode"] == "backup":
            return (
                f'{_START_AGAIN}, with {quorum}, or in mode "async", which waits for '
                f"nobody. Received: quorum={settings['quorum']}, with "
                f"{len(clock.workers)} workers"
            )
        return (
            f"{_START_AGAIN}; or use a mode that does not wait for such a worker: "
            f'"async", or "backup" with {quorum}.'
        )

    def is_over(self, now: float) -> bool:
        """Whether all have done their part, or nobody comes any more.

        If the last one there was is gone without that, another process may come in its
        place: a launcher starts it again, or somebody does.

        Args:
            now: time, in seconds.
        """
        if self.members or self.members.begun is None:
            return False
        over = self.is_done or self.failure is not None
        return over or self.members.stay_away(now, self._limits.start)

    @property
    def is_done(self) -> bool:
        """Whether all workers have done their part."""
        return self.members.are_done

    @property
    def handed(self) -> ModelSpec | None:
        """What this server is, as the first worker handed it over."""
        return self._admission.handed

    def summary(self) -> str:
        """Return what has been done, as a line of the log."""
        if self.model is None or self.pushes is None:
            return "nothing was trained"
        return self.pushes.summary(self.model)


_START_AGAIN = "End all workers and the server, and start them again"
_WITHOUT_ONE = (
    f"{_START_AGAIN}; or use a mode in which the others go on without a worker that "
    'ends or does not come: "async", "ssp" or "backup".'
)
