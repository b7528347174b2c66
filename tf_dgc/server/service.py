"""What requests do: who joins, what is applied when, and who is told what."""

import json
from collections.abc import Callable
from typing import cast

import numpy as np
import tensorflow as tf

from tf_dgc.server import handing
from tf_dgc.server.clock import Clock, names, staleness_of
from tf_dgc.server.handing import Handed
from tf_dgc.server.members import Limits, Member, Members
from tf_dgc.server.messages import Kind, Status, to_body, to_text
from tf_dgc.server.model import Model, Push
from tf_dgc.server.sessions import Reply


class Service:
    """Serves one model to workers.

    Args:
        num_workers: number of workers, N.
        limits: seconds that are waited.
        say: function that is given lines of the log.

    Attributes:
        members: processes that take part.
        model: model; None until the first weights are there.
        clock: clock; None until the first worker has joined.
        failure: reason for which nobody can go on, or None.
    """

    def __init__(self, num_workers: int, limits: Limits, say: Callable[[str], None]):
        self.members = Members()
        self.model: Model | None = None
        self.clock: Clock | None = None
        self.failure: str | None = None
        self._num_workers, self._limits, self._say = num_workers, limits, say
        self._handed: Handed | None = None
        self._giver: Member | None = None
        self._pushes: list[tuple[Push, Member]] = []
        self._started = False
        self._begun: float | None = None  # when the first one joined
        self._came: set[int] = set()
        self._alone = 0.0  # when the last one left

    def do(self, member: Member, kind: Kind, body: np.ndarray, now: float) -> None:
        """Do what a request asks for; answer it now or hold it.

        Args:
            member: member whose session holds it.
            kind: kind of the request.
            body: body of it, whole.
            now: time, in seconds.
        """
        if kind == Kind.JOIN:
            self._join(member, body, now)
        elif kind == Kind.GIVE:
            self._take_weights(member, body)
        elif kind == Kind.PULL and self.model is not None:
            member.give(self._weights(self.model, member.worker, whole=True))
        elif kind in (Kind.START, Kind.ASK, Kind.PUSH):
            member.hold(now)
        else:
            member.refuse(f"a request of kind {kind} has no place here")

    # --- joining --------------------------------------------------------------------

    def _join(self, member: Member, body: np.ndarray, now: float) -> None:
        try:
            handed = json.loads(to_text(body))
            differs = self._differs(handed)
        except (KeyError, TypeError, ValueError) as error:
            differs = f"it cannot be read ({error})"
        if differs:
            reason = f"what it is to be trained with: {differs}"
            self._say(f"worker {member.worker} is refused, by {reason}")
            member.refuse(
                f"The server refuses worker {member.worker}, by {reason}. All workers "
                "must run the same version of tf_dgc, with the same model and settings."
            )
            self.members.pop(member.worker, None)
            return
        if self._handed is None:
            self._handed, self._begun = handed, now
            settings = handed["settings"]
            self.clock = Clock(staleness_of(settings["mode"], settings["staleness"]))
        self._came.add(member.worker)
        if self._started and self.clock:
            self.clock.join(member.worker)
        gives = self.model is None and self._giver is None
        if gives:
            self._giver = member
        late = f", at update {self.model.clock}" if self.model else ""
        there = f"{len(self.members)} of {self._num_workers}"
        self._say(f"worker {member.worker} joins ({there}{late})")
        member.give(Reply(body=to_body(json.dumps({"give": gives}))))

    def _differs(self, handed: Handed) -> str | None:
        if handed["num_workers"] != self._num_workers:
            return (
                f"num_workers is {handed['num_workers']}, and the server's TF_CONFIG "
                f"names {self._num_workers}"
            )
        if self._handed is None:
            staleness_of(handed["settings"]["mode"], handed["settings"]["staleness"])
            return None
        return handing.difference(self._handed, handed)

    def _take_weights(self, member: Member, body: np.ndarray) -> None:
        if self._handed is None or self._giver is not member or self.model:
            member.refuse("nobody asked for weights")
            return
        try:
            model = Model(self._handed)
            model.load(body)
        except (KeyError, TypeError, ValueError) as error:
            self._handed = self._giver = None
            reason = (
                "The server cannot make the optimizer or the compressor of their "
                f"configs; it knows those of Keras and of tf_dgc. It says: {error}"
            )
            self.drop(member, reason)
            return
        self.model = model
        self._say(f"{model.num_words} words of weights, of worker {member.worker}")
        member.give(Reply())

    # --- pushes ---------------------------------------------------------------------

    def push(self, member: Member, push: Push, rate: float) -> bool:
        """Take a push; return whether there was a place for it.

        Args:
            member: member that it is from.
            push: push.
            rate: learning rate of the worker, NaN if it has a schedule.
        """
        if self.model is None or self.clock is None or not self._started:
            return False
        if member.rate not in (None, rate) and not np.isnan(rate):
            self.model.set_rate(rate)
            self._say(f"learning rate {rate:g}, by worker {member.worker}")
        member.rate = rate
        self._pushes.append((push, member))
        self.clock.push(member.worker)
        return True

    def _apply(self, model: Model, clock: Clock) -> None:
        """Apply what is due; who pushed what cannot be applied is dropped."""
        for group in clock.due():
            found = [p for p in self._pushes if p[0].worker in group]
            self._pushes = [p for p in self._pushes if p[0].worker not in group]
            found.sort(key=lambda p: p[0].worker)
            try:
                model.apply([push for push, _ in found])
            except (ValueError, tf.errors.InvalidArgumentError) as error:
                text = getattr(error, "message", str(error)).splitlines()[0]
                for _, member in found:
                    self.drop(member, f"what it pushed is refused: {text}")
                continue
            for _, member in found:
                member.pushes += 1

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
        return self._handed is not None and self._handed["settings"]["mode"] == "sync"

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
        if self.model and self.clock:
            self._apply(self.model, self.clock)
        for member in [m for m in self.members.values() if m.waits]:
            self._settle(member, now)
        if self.members:
            self._alone = now

    def _start(self, now: float) -> None:
        if self._started or self.clock is None or self.model is None:
            return
        missing = sorted(set(range(self._num_workers)) - set(self.members))
        in_time = self._begun is None or now - self._begun < self._limits.start
        if missing and in_time and self.clock.staleness < np.inf:
            return
        if missing and self._is_strict:
            self.failure = (
                f"{names(missing)} did not come within {self._limits.start:g} s "
                "(environment variable TF_DGC_START_TIMEOUT)"
            )
            return
        self._started = True
        for worker in self.members:
            self.clock.join(worker)

    def _settle(self, member: Member, now: float) -> None:
        """Answer who waits, if there is something to say."""
        clock = self.clock
        if self.failure:
            member.refuse(f"The run cannot go on: {self.failure}. {_ADVICE}")
        elif self._giver is None and self.model is None:
            member.give(Reply(Status.AGAIN))
        elif clock and self._started and clock.may_go_on(member.worker):
            clock.go_on(member.worker)
            model = cast(Model, self.model)
            member.give(self._weights(model, member.worker, member.whole))
        elif clock and self._started and member.waited(now) > self._limits.wait:
            others = names(clock.waited_for(member.worker))
            member.refuse(
                f"worker {member.worker} waited {self._limits.wait:g} s (environment "
                f"variable TF_DGC_TIMEOUT) for {others}, which responds but does not "
                f"come. {_ADVICE}"
            )
        else:
            member.put_off(now, self._limits.hold)

    def _weights(self, model: Model, worker: int, whole: bool) -> Reply:
        body = model.whole(worker) if whole else model.pull(worker)
        return Reply(body=body, clock=model.clock)

    def is_over(self, now: float) -> bool:
        """Whether all have come and gone, or nobody comes any more.

        Args:
            now: time, in seconds.
        """
        if self.members or not self._came:
            return False
        everyone = len(self._came) == self._num_workers
        return everyone or now - self._alone > self._limits.start

    def summary(self) -> str:
        """Return what has been done, as a line of the log."""
        updates = self.model.clock if self.model else 0
        ahead = self.clock.most_ahead if self.clock else 0
        return f"{updates} updates; at most {ahead} steps ahead of the slowest worker"


_ADVICE = (
    "End all workers and the server, and start them again; or use a mode that goes on "
    'without one, "async" or "ssp".'
)
