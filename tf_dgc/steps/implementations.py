"""The kinds of steps, and which of them a step is.

A kind is a function of `Inputs` that returns a `Step`, or None for inputs that are not
for it. The first in the list that returns one is chosen.
"""

from collections.abc import Callable

from tf_dgc.steps import engine_step, generic_step, top_k_step
from tf_dgc.steps.base import Step, StepInputs

IMPLEMENTATIONS: list[Callable[[StepInputs], Step | None]] = [
    top_k_step.start_top_k_step,
    engine_step.start_engine_step,
    generic_step.start_generic_step,
]


def start_step(inputs: StepInputs) -> Step:
    """Return the step to be run."""
    steps = (kind(inputs) for kind in IMPLEMENTATIONS)
    return next(step for step in steps if step is not None)
