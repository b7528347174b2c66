"""The parts of a model that take turns with a delay, and what both may be."""

from collections.abc import Sequence
from typing import Any

import keras

from tf_dgc import arguments
from tf_dgc.arguments import show
from tf_dgc.compressors import Compressor
from tf_dgc.exchanges import Gossip


def split(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Return the places of tensors in parts of about the same number of entries.

    Args:
        sizes: entries of each tensor.
        number: number of parts.

    Raises:
        ValueError: for more parts than tensors.
    """
    if number > len(sizes):
        raise ValueError(
            "Each of `parts` needs a variable of the model. Use fewer. Received: "
            f"parts={number} with {len(sizes)} variables"
        )
    parts: list[list[int]] = [[] for _ in range(number)]
    filled = [0] * number
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = min(range(number), key=lambda part: (filled[part], len(parts[part])))
        parts[least].append(place)
        filled[least] += max(1, sizes[place])
    return [sorted(part) for part in parts]


def check(
    delay: Any,
    parts: Any,
    period: Any,
    compressor: Compressor,
    exchange: Any,
) -> tuple[int, int]:
    """Return both as ints; raise `ValueError` for those that cannot be.

    Args:
        delay: number of steps that a mean may take.
        parts: number of parts of the model.
        period: number of steps of a round, or a schedule.
        compressor: method.
        exchange: exchange, or its name.
    """
    delay = arguments.check_whole("delay", delay, 0, " of steps (0: none)")
    parts = arguments.check_whole("parts", parts, 1, " of parts of the model")
    given = f"Received: delay={delay}, parts={parts}, period={show(period)}"
    if delay and isinstance(exchange, Gossip):
        raise ValueError(
            "With `Gossip` a worker waits for its neighbours alone, and there is no "
            f"mean that could come later. Use `delay=0`. {given}, {exchange!r}"
        )
    if parts == 1:
        most = delay if callable(period) else period
    elif not delay:
        raise ValueError(
            f"`parts` take turns in the background, so pass a `delay`. {given}"
        )
    elif callable(period) or period % parts:
        raise ValueError(
            "With `parts` the `period` must be a number of steps that `parts` divides, "
            f"as one of them is exchanged every `period / parts`. {given}"
        )
    else:
        most = period // parts
    if delay > most:
        raise ValueError(
            "The mean of a round must be there before the next one is formed, so "
            f"`delay` must be `period / parts` at the most, here {most}. {given}"
        )
    if parts > 1 and compressor.together:
        raise ValueError(
            f"{compressor!r} sees all tensors as one, so they cannot take turns. Use "
            f"`parts=1`, or another method. {given}"
        )
    return delay, parts


def check_outer(outer: keras.optimizers.Optimizer, parts: int) -> None:
    """Raise `ValueError` for an outer optimizer whose step cannot be in parts.

    Args:
        outer: outer optimizer.
        parts: number of parts of the model.
    """
    if parts == 1:
        return
    given = f"Received: parts={parts}, outer={show(outer)}"
    if outer.use_ema:
        raise ValueError(
            "Averages of the outer optimizer are of all tensors, and with `parts` one "
            f"part of them arrives at a time. Use `parts=1`, or no `use_ema`. {given}"
        )
    if outer.global_clipnorm:
        raise ValueError(
            "The norm by which `global_clipnorm` clips is of all tensors, and with "
            "`parts` one part of them arrives at a time. Use `parts=1`, or let the "
            f"outer optimizer clip by `clipnorm`, each tensor by its own. {given}"
        )
    if isinstance(outer, keras.optimizers.Nadam):
        raise ValueError(
            "A `Nadam` keeps a number of its steps, which with `parts` it would take "
            f"once for each of them. Use `parts=1`, or `Adam` as `outer`. {given}"
        )


def period_of(optimizer: Any) -> Any:
    """Return how many steps lie between two exchanges, or a schedule of it."""
    parts = optimizer.parts
    return optimizer.period if parts == 1 else optimizer.period // parts
