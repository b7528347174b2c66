"""Weigh: multiply gradients by a learning rate before they wait."""

from typing import Any

import tensorflow as tf

from tf_dgc.steps import native, operations
from tf_dgc.steps.accumulation import entries
from tf_dgc.steps.base import Inputs


def weigh(inputs: Inputs, rate: Any) -> Inputs:
    """Return what goes into a step whose gradients are multiplied by a rate.

    Whether they are finite is looked at here: a scale that is a tensor says so.

    Args:
        inputs: inputs of the step.
        rate: learning rate of the step, a scalar.
    """
    values, given = list(map(entries, inputs.gradients)), inputs.scales
    kept = inputs.memory.residual
    path = native if native.is_live(kept) else operations
    scales = path.drop(values, given, kept) * tf.cast(rate, tf.float64)
    if all(s is given[0] for s in given):
        return inputs._replace(scales=[scales[0]] * len(given))
    return inputs._replace(scales=tf.unstack(scales))
