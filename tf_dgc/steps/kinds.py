"""The kinds of steps, and which of them a step is.

A kind is a function of `Inputs` that returns a `Step`, or None for inputs that are not
for it. The first in the list that returns one is chosen.
"""

from collections.abc import Callable

from tf_dgc.steps import composed, engine, fused
from tf_dgc.steps.base import Inputs, Step

KINDS: list[Callable[[Inputs], Step | None]] = [
    fused.begin,
    engine.begin,
    composed.begin,
]


def begin(inputs: Inputs) -> Step:
    """Return the step to be run."""
    steps = (kind(inputs) for kind in KINDS)
    return next(step for step in steps if step is not None)
