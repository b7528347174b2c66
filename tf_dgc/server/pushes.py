"""Pushes that came: which are in time, which learning rate counts, what is applied."""

import math
from collections.abc import Callable, Iterator, Sequence

from tf_dgc.server.clock import Clock
from tf_dgc.server.members import Member
from tf_dgc.server.messages import Push, brief
from tf_dgc.server.model import Model


class Pushes:
    """Pushes that have not been applied, and who they are from.

    Args:
        clock: clock that says which are due.
        say: function that is given lines of the log.

    Attributes:
        late: number of those that came when their step had been taken.
    """

    def __init__(self, clock: Clock, say: Callable[[str], None]):
        self.late = 0
        self._clock, self._say = clock, say
        self._waiting: list[tuple[Push, Member]] = []
        self._most = 0  # pushes of any process

    def take(self, member: Member, push: Push, rate: float, model: Model) -> str | None:
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

    def _set_rate(self, member: Member, rate: float, model: Model) -> None:
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

    def apply(self, model: Model) -> Iterator[tuple[Member, str]]:
        """Apply what is due; yield who pushed what cannot be applied, and why."""
        for group in self._clock.due():
            found = [p for p in self._waiting if p[0].worker in group]
            self._waiting = [p for p in self._waiting if p[0].worker not in group]
            found.sort(key=lambda p: p[0].worker)
            yield from _apply(model, found)

    def summary(self, model: Model) -> str:
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
    model: Model, found: Sequence[tuple[Push, Member]]
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
