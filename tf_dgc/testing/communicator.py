"""What the communicator does, for all workers of one process at once."""

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc.collectives.requests import Both, Gather, Message, Reply, Sum, Swap

Outcome = TypeVar("Outcome")


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
    outcomes: list[Outcome] = []
    replies: list[Any] = [None] * len(steps)
    while not outcomes:
        asked = []
        for step, reply in zip(steps, replies, strict=True):
            try:
                asked.append(step.send(reply))
            except StopIteration as end:
                outcomes.append(end.value)
        if asked and outcomes:
            raise ValueError("Some workers ask for more rounds than others.")
        for messages, new in zip(record or [], asked, strict=False):
            messages.extend(new)
        answers = [answer_all(messages) for messages in zip(*asked, strict=True)]
        replies = [list(row) for row in zip(*answers, strict=True)]
    return outcomes


def answer_all(messages: Sequence[Message]) -> list[Reply]:
    """Return the replies to what all workers ask for at once, by worker.

    Args:
        messages: message of each worker, all of one kind.

    Raises:
        ValueError: for messages of different kinds or groups, and swaps that are not
            mutual.
    """
    if len({type(message) for message in messages}) > 1:
        raise ValueError(f"All workers must ask for the same. Received: {messages!r}")
    if isinstance(messages[0], Swap):
        return [_swapped(messages, worker) for worker in range(len(messages))]
    return _collectives(messages)


def _collectives(messages: Sequence[Any]) -> list[Reply]:
    replies: dict[Any, Reply] = {}  # of a group, the same for all of its workers
    for worker, message in enumerate(messages):
        members = _members(messages, worker)
        if message.group not in replies:
            replies[message.group] = _collective([messages[m] for m in members])
    return [replies[message.group] for message in messages]


def _members(messages: Sequence[Any], worker: int) -> Sequence[int]:
    """Return the workers with which this one meets."""
    group = messages[worker].group
    members = range(len(messages)) if group is None else group
    theirs = [messages[member].group for member in members]
    if worker not in members or any(other != group for other in theirs):
        raise ValueError(
            "All workers of a group, and no others, must ask for the same group. "
            f"Received: group={group} of worker {worker}, and of its members {theirs}"
        )
    return members


def _collective(messages: Sequence[Any]) -> Reply:
    first = messages[0]
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


def _swapped(messages: Sequence[Any], worker: int) -> tf.Tensor:
    partner = messages[worker].partner
    if not 0 <= partner < len(messages) or messages[partner].partner != worker:
        raise ValueError(
            "A swap must be asked for by both workers of a pair. Received: worker "
            f"{worker} asks for worker {partner} of {len(messages)}"
        )
    return messages[partner].words
