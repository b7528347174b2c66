"""Positions of workers: how many collectives each has started and finished."""

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Group: TypeAlias = tuple[int, ...] | None
"""Indices of the workers that take part, ascending; None for all.

A group of background collectives begins with a number below 0.
"""

Counts: TypeAlias = Mapping[Group, Sequence[int]]
"""Number of collectives started and finished, by group."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a worker waits in; key equal on all workers, 0 if unknown."""

    key: int
    name: str

    @classmethod
    def of_purpose(cls, purpose: str) -> "Collective":
        """Return a wait that is identified by its purpose alone."""
        return cls(1 + zlib.crc32(purpose.encode()), purpose)


@dataclasses.dataclass(frozen=True)
class Position:
    """A worker's position, as it publishes it."""

    counts: dict[Group, tuple[int, int]]  # started and finished, by group
    tracing: bool
    place: str  # place in the user's program, as text
    line: str = ""
    collectives: dict[Group, Collective] = dataclasses.field(default_factory=dict)
    beat: int = dataclasses.field(default=0, compare=False)

    @property
    def waits_in(self) -> list[Group]:
        """Groups in whose collectives this worker waits."""
        return [
            group
            for group, (started, finished) in self.counts.items()
            if finished < started
        ]

    def waits_for(self, index: int) -> list[Group]:
        """Return the groups it waits in that the worker with this index belongs to."""
        return [g for g in self.waits_in if g is None or index in g]

    def started(self, group: Group) -> int:
        """Return how many collectives of a group this worker has started."""
        return self.counts.get(group, (0, 0))[0]

    def to_json(self) -> str:
        """Return the position as text."""
        counts = [[group, *pair] for group, pair in self.counts.items()]
        collectives = [[g, c.key, c.name] for g, c in self.collectives.items()]
        return json.dumps(
            [counts, self.tracing, self.place, self.line, collectives, self.beat]
        )

    @classmethod
    def from_json(cls, text: str) -> "Position":
        """Return the position that `to_json` wrote."""
        counts, tracing, place, line, collectives, beat = json.loads(text)
        pairs = {_group(group): (s, f) for group, s, f in counts}
        pending = {_group(g): Collective(key, name) for g, key, name in collectives}
        return cls(pairs, tracing, place, line, pending, beat)


def _group(indices: list[int] | None) -> Group:
    return None if indices is None else tuple(indices)


def in_different_collectives(position: Position, other: Position) -> bool:
    """Whether two workers wait for each other in different collectives of a group."""
    return any(
        group in other.waits_in
        and other.started(group) == position.started(group)
        and other.collectives[group].key != position.collectives[group].key
        for group in position.waits_in
        if group in position.collectives and group in other.collectives
    )


def is_behind(
    position: Position, other: Position, other_index: int, background: bool = True
) -> bool:
    """Whether the other worker has yet to come to where this one waits."""
    return any(
        other.started(group) < position.started(group)
        for group in position.waits_for(other_index)
        if background or group is None or min(group) >= 0
    )


def wait_for_each_other(
    position: Position, index: int, other: Position, other_index: int
) -> bool:
    """Whether each of two workers waits where the other has yet to come."""
    # Background groups do not count: a worker that waits there may still come.
    return is_behind(position, other, other_index, background=False) and is_behind(
        other, position, index, background=False
    )


def describe_position(position: Position) -> str:
    """Return which collectives a worker waits in, for errors."""
    return " and ".join(
        f"collective {position.started(group)}" + _describe_group(group)
        for group in position.waits_in
    )


def _describe_group(group: Group) -> str:
    if group is None:
        return ""
    if min(group) < 0:
        return " in the background"
    return f" of workers {', '.join(map(str, group))}"
