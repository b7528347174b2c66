"""What the communicator does, for all workers of one process at once."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tf_dgc.collectives.groups import members_of
from tf_dgc.collectives.lockstep import run_together
from tf_dgc.collectives.requests import (
    Both,
    Broadcast,
    Gather,
    Message,
    Reply,
    Spread,
    Sum,
    Swap,
)

Outcome = TypeVar("Outcome")


class _Meeting(NamedTuple):
    """What several workers ask for together.

    Attributes:
        kind: type of the messages.
        group: group as they name it.
        source: worker that a broadcast comes from.
        turn: number of the same before it, in this round.
        members: workers that take part.
    """

    kind: type
    group: Any
    source: int | None
    turn: int
    members: tuple[int, ...]


def run_all(
    steps: Sequence[Generator[list[Message], list[Reply], Outcome]],
    record: list[list[Message]] | None = None,
) -> list[Outcome]:
    """Run the steps of all workers in lockstep; return their outcomes, by worker.

    Args:
        steps: step of each worker.
        record: lists, one per worker, to which all that it asks for is appended.

    Raises:
        ValueError: if some ask for more rounds than others, and as `answer_all`.
    """

    def answer(asked: list[list[Message]]) -> list[list[Reply]]:
        for messages, new in zip(record or [], asked, strict=False):
            messages.extend(new)
        return answer_all(asked)

    return run_together(steps, answer)


def answer_all(asked: Sequence[Sequence[Message]]) -> list[list[Reply]]:
    """Return the replies to what all workers ask for in a round, by worker.

    Args:
        asked: messages of each worker, in order; a worker may have none.

    Raises:
        ValueError: if not all workers of a group ask for the same, and as `members_of`.
    """
    meetings: dict[_Meeting, dict[int, tuple[int, Any]]] = {}
    for worker, messages in enumerate(asked):
        for place, message in enumerate(messages):
            meeting = _meeting(message, worker, asked)
            while worker in meetings.get(meeting, {}):
                meeting = meeting._replace(turn=meeting.turn + 1)
            meetings.setdefault(meeting, {})[worker] = place, message
    replies: list[list[Any]] = [[None] * len(messages) for messages in asked]
    for meeting, found in meetings.items():
        if set(found) != set(meeting.members):
            raise ValueError(_mismatch(meeting, sorted(found), asked))
        answers = _answer(meeting, [found[m][1] for m in meeting.members])
        for member, answer in zip(meeting.members, answers, strict=True):
            replies[member][found[member][0]] = answer
    return replies


def _meeting(message: Message, worker: int, asked: Sequence) -> _Meeting:
    members = members_of(message, worker, len(asked))
    group = None if isinstance(message, Swap) else message.group
    source = message.source if isinstance(message, Broadcast) else None
    return _Meeting(type(message), group, source, 0, members)


def _mismatch(meeting: _Meeting, found: list[int], asked: Sequence) -> str:
    if meeting.kind is Swap:
        return (
            "A swap must be asked for by both workers of a pair. Received: of workers "
            f"{meeting.members} only {found} ask for it"
        )
    others = [asked[m] for m in meeting.members if m not in found]
    return (
        "All workers of a group must ask for the same. Received: of workers "
        f"{meeting.members} only {found} ask for {meeting.kind.__name__} with "
        f"group={meeting.group}, and the others for {others!r}"
    )


def _answer(meeting: _Meeting, messages: Sequence[Any]) -> list[Reply]:
    """Return the reply to each member."""
    if meeting.kind is Swap:
        return [message.values for message in reversed(messages)]
    if meeting.kind is Spread:
        rows = [message.rows for message in messages]
        return [tf.stack(theirs) for theirs in zip(*map(tf.unstack, rows), strict=True)]
    return [_same_for_all(meeting, messages)] * len(messages)


def _same_for_all(meeting: _Meeting, messages: Sequence[Any]) -> Reply:
    first = messages[0]
    if isinstance(first, Broadcast):
        return messages[meeting.members.index(first.source)].values
    if isinstance(first, Sum):
        return _add([message.values for message in messages])
    if isinstance(first, Gather):
        return tf.stack([message.words for message in messages])
    if first.dense:
        total = _add([message.vector for message in messages])
        return Both(total, tf.zeros([len(messages), 0], tf.int32))
    return Both(first.vector[:0], tf.stack([message.words for message in messages]))


def _add(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    return total
