"""A step on one worker, up to what is handed over, by TensorFlow operations.

The native operations (`native.py`) do the same in one pass over memory; a test holds
both to the same results.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc import clipping, payload
from tf_dgc.clipping import Scale
from tf_dgc.correction import correct, correct_within_range
from tf_dgc.payload import Plan
from tf_dgc.wire import TensorLayout


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
    velocity, residual, finite = accumulate(
        step.plan.layout,
        step.gradients,
        step.scales,
        step.velocity,
        step.residual,
        step.momentum,
        step.nesterov,
    )
    vector, words, velocity, residual = payload.pack(
        step.plan, velocity, residual, finite, step.offsets, step.factor_masking
    )
    store(step.velocity, velocity)
    store(step.residual, residual)
    return vector, words, finite


def to_dense(gradient: Any, variable: keras.Variable) -> tf.Tensor:
    """Return a gradient as a tensor of the variable's type.

    Args:
        gradient: a tensor or `tf.IndexedSlices`, whose parts may be anything that
            TensorFlow makes a tensor of; values of the same row are summed.
        variable: of the model.
    """
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.cast(tf.convert_to_tensor(gradient.indices), tf.int64)
        shape = tf.constant(tuple(variable.shape), tf.int64)
        gradient = tf.scatter_nd(rows[:, tf.newaxis], gradient.values, shape)
    return tf.cast(gradient, variable.dtype)


def accumulate(
    layout: Sequence[TensorLayout],
    gradients: Sequence[tf.Tensor],
    scales: Sequence[Scale],
    velocity: Sequence[Any] | None,
    residual: Sequence[Any] | None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[list, list, tf.Tensor]:
    """Drop gradients that are not finite, and correct, within the numbers' range.

    Args:
        layout: of every tensor.
        gradients: as in `LocalStep`, like the others.
        scales: of the gradients.
        velocity: variables, or None.
        residual: variables, or None.
        momentum: coefficient.
        nesterov: whether it is Nesterov's.

    Returns:
        Velocity (or Nones) and residual (or the gradient), `[n]` of each tensor, and
        whether the gradient was finite and nothing overflowed.
    """
    flat = [
        tf.cast(tf.reshape(g, [t.size]), t.dtype)
        for g, t in zip(gradients, layout, strict=True)
    ]
    flat, finite = clipping.multiply(flat, scales)
    if residual is None:
        return [None] * len(flat), flat, finite
    old_velocity = [_flat(v) for v in velocity or [None] * len(flat)]
    old_residual = [_flat(r) for r in residual]

    def all_by(rule: Callable) -> tuple[list, list]:
        parts = zip(flat, old_velocity, old_residual, strict=True)
        pairs = [rule(g, v, r, momentum, nesterov) for g, v, r in parts]
        return [v for v, _ in pairs], [r for _, r in pairs]

    corrected = all_by(correct)
    fits = clipping.all_finite(corrected[1])
    new_velocity, new_residual = tf.cond(
        fits, lambda: corrected, lambda: all_by(correct_within_range)
    )
    return new_velocity, new_residual, tf.logical_and(finite, fits)


def _flat(variable: Any) -> tf.Tensor | None:
    return None if variable is None else tf.reshape(variable.local(), [-1])


def store(variables: Sequence[Any] | None, values: Sequence[tf.Tensor]) -> None:
    """Assign values of any shape to variables, if there are any."""
    for variable, value in zip(variables or [], values, strict=False):
        variable.assign(tf.reshape(value, variable.shape))
