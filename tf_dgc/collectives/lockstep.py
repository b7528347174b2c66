"""Lockstep: the rounds of several workers in one process."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


def run_together(
    steps: Sequence[Generator[Any, Any, Outcome]],
    answer: Callable[[list[Any]], Sequence[Any]],
) -> list[Outcome]:
    """Run the rounds of several workers in lockstep; return their outcomes.

    Args:
        steps: rounds of each worker, as many of all.
        answer: function that returns the replies to what each asks for in a round.

    Raises:
        ValueError: if some ask for more rounds than others.
    """
    outcomes: list[Outcome] = []
    replies: Sequence[Any] = [None] * len(steps)
    while len(outcomes) < len(steps):
        asked = []
        for step, reply in zip(steps, replies, strict=True):
            try:
                asked.append(step.send(reply))
            except StopIteration as end:
                outcomes.append(end.value)
        if asked:
            if outcomes:
                raise ValueError("Some workers ask for more rounds than others.")
            replies = answer(asked)
    return outcomes
