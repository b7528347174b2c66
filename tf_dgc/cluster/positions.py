"""Where workers are: how many collectives of each group they have come to."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Group: TypeAlias = tuple[int, ...] | None
"""Indices of the workers that meet, ascending; None for all.

Of what goes on beside the steps, a number below 0 comes before them.
"""

Counts: TypeAlias = Mapping[Group, Sequence[int]]
"""Collectives started and finished, of each group."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a worker is, as it publishes it.

    Attributes:
        counts: number of collectives started and finished, of each group that this
            worker has been in.
        tracing: whether it is tracing a `tf.function`.
        place: place in the user's program, as text.
    """

    counts: dict[Group, tuple[int, int]]
    tracing: bool
    place: str

    @property
    def waits_in(self) -> list[Group]:
        """Groups in a collective of which it is."""
        return [
            g for g, (started, finished) in self.counts.items() if finished < started
        ]

    def waits_for(self, index: int) -> list[Group]:
        """Return the groups it waits in of which the worker of this index is one."""
        return [g for g in self.waits_in if g is None or index in g]

    def started(self, group: Group) -> int:
        """Return how many collectives of a group it has come to."""
        return self.counts.get(group, (0, 0))[0]

    def to_json(self) -> str:
        """Return it as text."""
        counts = [[group, *pair] for group, pair in self.counts.items()]
        return json.dumps([counts, self.tracing, self.place])

    @classmethod
    def from_json(cls, text: str) -> "Position":
        """Return what `to_json` made a text of."""
        counts, tracing, place = json.loads(text)
        pairs = {group and tuple(group): (s, f) for group, s, f in counts}
        return cls(pairs, tracing, place)


def behind(mine: Position, other: Position, index: int) -> bool:
    """Whether another worker has yet to come to where this one waits.

    Args:
        mine: position of this worker.
        other: position of the other one.
        index: index of the other one among all.
    """
    return any(
        other.started(group) < mine.started(group) for group in mine.waits_for(index)
    )


def describe(position: Position) -> str:
    """Return which collectives a worker waits in, as errors say it."""
    return " and ".join(
        f"collective {position.started(group)}" + _members(group)
        for group in position.waits_in
    )


def _members(group: Group) -> str:
    if group is None:
        return ""
    if min(group) < 0:
        return " in the background"
    return f" of workers {', '.join(map(str, group))}"
