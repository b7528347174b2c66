"""The inner optimizer's update, from what a step comes to."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_dgc.optimizers import takeover
from tf_dgc.steps.base import Outcome


def update(
    rule: keras.optimizers.Optimizer,
    outcome: Outcome,
    variables: Sequence[keras.Variable],
) -> tf.Tensor:
    """Let the inner optimizer apply the sums.

    Where all that it does is to subtract them, and the step has a shorter way for that,
    only what was sent is touched.

    Args:
        rule: inner optimizer, without what was taken over.
        outcome: outcome of the step.
        variables: variables of the model, in the order of the step's tensors.

    Returns:
        The number of workers whose gradient was not finite, scalar int32.
    """
    if outcome.descend and takeover.is_plain_descent(rule, variables):
        nonfinite = outcome.descend(variables, rule.learning_rate)
        rule.iterations.assign_add(1)
        return nonfinite
    sums, nonfinite = outcome.decode()
    # Not `apply`: a trainer calls this, and a subclass may have its own.
    rule.apply_gradients(
        [
            (tf.cast(tf.reshape(s, v.shape), v.dtype), v)
            for s, v in zip(sums, variables, strict=True)
        ]
    )
    return nonfinite
