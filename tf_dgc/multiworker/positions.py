"""Where workers are: how many collectives of each group they have come to."""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Group: TypeAlias = tuple[int, ...] | None
"""Indices of the workers that meet, ascending; None for all.

Of what goes on beside the steps, a number below 0 comes before them.
"""

Counts: TypeAlias = Mapping[Group, Sequence[int]]
"""Collectives started and finished, of each group."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a worker waits in.

    Attributes:
        key: number that all workers of a collective have in common, and that differs
            between kinds, dtypes and shapes; 0 if it is not known.
        name: name of it, as errors say it.
    """

    key: int
    name: str

    @classmethod
    def of_purpose(cls, purpose: str) -> "Collective":
        """Return what is told apart from others by its purpose alone."""
        return cls(1 + zlib.crc32(purpose.encode()), purpose)


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a worker is, as it publishes it.

    Attributes:
        counts: number of collectives started and finished, of each group that this
            worker has been in.
        tracing: whether it is tracing a `tf.function`.
        place: place in the user's program, as text.
        line: text of the line there.
        collectives: collectives that this worker waits in, of each group; without
            those that are not known.
        beat: number that changes as long as this worker traces and is not stuck.
    """

    counts: dict[Group, tuple[int, int]]
    tracing: bool
    place: str
    line: str = ""
    collectives: dict[Group, Collective] = dataclasses.field(default_factory=dict)
    beat: int = dataclasses.field(default=0, compare=False)

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
        collectives = [[g, c.key, c.name] for g, c in self.collectives.items()]
        return json.dumps(
            [counts, self.tracing, self.place, self.line, collectives, self.beat]
        )

    @classmethod
    def from_json(cls, text: str) -> "Position":
        """Return what `to_json` made a text of."""
        counts, tracing, place, line, collectives, beat = json.loads(text)
        pairs = {_group(group): (s, f) for group, s, f in counts}
        pending = {_group(g): Collective(key, name) for g, key, name in collectives}
        return cls(pairs, tracing, place, line, pending, beat)


def _group(indices: list[int] | None) -> Group:
    return None if indices is None else tuple(indices)


def differ(mine: Position, other: Position) -> bool:
    """Whether two workers wait for each other in different collectives.

    The nth collective of a group must be the same one on all of its members.
    """
    return any(
        group in other.waits_in
        and other.started(group) == mine.started(group)
        and other.collectives[group].key != mine.collectives[group].key
        for group in mine.waits_in
        if group in mine.collectives and group in other.collectives
    )


def wait_for_each_other(
    mine: Position, my_index: int, other: Position, index: int
) -> bool:
    """Whether each of two workers waits in a group to which the other has yet to come.

    What goes on in the background does not count: it has threads of its own, and a
    worker that waits there may come to the other's collective all the same.

    Args:
        mine: position of this worker.
        my_index: index of this worker among all.
        other: position of the other one.
        index: index of the other one among all.
    """
    return _in_steps(mine, other, index) and _in_steps(other, mine, my_index)


def _in_steps(waiting: Position, other: Position, index: int) -> bool:
    """Do what `behind` does, without what goes on in the background."""
    return any(
        other.started(group) < waiting.started(group)
        for group in waiting.waits_for(index)
        if group is None or min(group) >= 0
    )


def workers_behind(mine: Position, other: Position, index: int) -> bool:
    """Whether another worker has yet to come to where this one waits.

    Args:
        mine: position of this worker.
        other: position of the other one.
        index: index of the other one among all.
    """
    return any(
        other.started(group) < mine.started(group) for group in mine.waits_for(index)
    )


def describe_positions(position: Position) -> str:
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
