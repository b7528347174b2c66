"""Rate correction: a gradient that waits counts by the learning rate of its own step.

Keras's SGD has the learning rate within its momentum: `m = momentum * m - rate * g`.
So does error feedback as it was analysed first (Karimireddy et al., "Error feedback
fixes SignSGD", ICML 2019, algorithm 2: `p = rate * g + e`). Where the rate multiplies
the sum instead, as in Lin et al., ICLR 2018, an entry that waited while the rate fell
counts for less than in training that sends everything.

Keras's Adam has the rate outside of its momentum. Where waiting has taken the place of
the momentum (`waiting.py`) there is no such difference, and it has it inside too; else
what waits does not wait for long, and the rate stays outside.
"""

from typing import Any

from tf_dgc._internals import keras_optimizers


def apply_sums_as_they_are(optimizer: Any) -> None:
    """Let an SGD take sums that have the learning rate in them already.

    Args:
        optimizer: inner optimizer, whose step is `SGD`'s own; the decay of weights goes
            on by its learning rate.
    """

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        del learning_rate
        type(optimizer).update_step(optimizer, gradient, variable, 1.0)

    keras_optimizers.replace_update_step(optimizer, update_step)
