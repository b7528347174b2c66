"""A step on one worker, up to what is handed over, by TensorFlow operations.

The native operations (`native.py`) do the same in one pass over memory; a test holds
both to the same results.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc import clipping, payload
from tf_dgc.clipping import Scale
from tf_dgc.correction import correct
from tf_dgc.payload import Plan


class LocalStep(NamedTuple):
    """What goes into a step on one worker.

    Attributes:
        plan: what is sent.
        gradients: one per tensor, of any shape, not yet multiplied by `scales`.
        scales: of each gradient, as `clipping.clip` returns them.
        velocity: variables, one per tensor; None without momentum correction.
        residual: variables, one per tensor; None if nothing is ever kept back.
        offsets: scalar int32 per tensor, where ties are broken from.
        momentum: coefficient of the correction.
        nesterov: whether it is Nesterov's.
        factor_masking: clear the velocity where entries are sent.
    """

    plan: Plan
    gradients: Sequence[tf.Tensor]
    scales: Sequence[Scale]
    velocity: Sequence[Any] | None
    residual: Sequence[Any] | None
    offsets: list[tf.Tensor]
    momentum: float
    nesterov: bool
    factor_masking: bool


def compress(step: LocalStep) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Correct, compress, mask and encode; update velocity and residual.

    Returns:
        The vector of a dense step (empty if sparse), the int32 words of a sparse step
        (empty if dense), and a scalar bool: whether this worker's gradient was finite.
    """
    flat = [
        tf.cast(tf.reshape(g, [t.size]), t.dtype)
        for g, t in zip(step.gradients, step.plan.layout, strict=True)
    ]
    gradients, finite = clipping.multiply(flat, step.scales)
    velocity, residual = _correct(step, gradients)
    vector, words, velocity, residual = payload.pack(
        step.plan, velocity, residual, finite, step.offsets, step.factor_masking
    )
    _store(step.velocity, velocity)
    _store(step.residual, residual)
    return vector, words, finite


def to_dense(gradient: Any, variable: keras.Variable) -> tf.Tensor:
    """Return a gradient as a tensor of the variable's type.

    Args:
        gradient: a tensor or `tf.IndexedSlices`.
        variable: of the model.
    """
    if isinstance(gradient, tf.IndexedSlices):
        rows = gradient.indices[:, tf.newaxis]
        shape = tf.constant(tuple(variable.shape), rows.dtype)
        gradient = tf.scatter_nd(rows, gradient.values, shape)
    return tf.cast(gradient, variable.dtype)


def _correct(step: LocalStep, gradients: list) -> tuple[list, list]:
    """Accumulate; return velocity (or Nones) and residual, `[n]` per tensor."""
    if step.residual is None:
        return [None] * len(gradients), gradients
    velocity = step.velocity or [None] * len(gradients)
    corrected = [
        correct(g, _flat(v), _flat(r), step.momentum, step.nesterov)
        for g, v, r in zip(gradients, velocity, step.residual, strict=True)
    ]
    return [v for v, _ in corrected], [r for _, r in corrected]


def _flat(variable: Any) -> tf.Tensor | None:
    return None if variable is None else tf.reshape(variable.local(), [-1])


def _store(variables: Sequence[Any] | None, values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables or [], values, strict=False):
        variable.assign(tf.reshape(value, variable.shape))
