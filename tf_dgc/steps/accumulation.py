"""Accumulation: a gradient into velocity and residual, by TensorFlow operations."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.codecs.tensor import Tensor
from tf_dgc.transforms import clipping
from tf_dgc.transforms.clipping import Scale
from tf_dgc.transforms.correction import correct, correct_within_range


def to_dense(gradient: Any, variable: keras.Variable) -> tf.Tensor:
    """Return a gradient as a tensor of the variable's type.

    Args:
        gradient: a tensor or `tf.IndexedSlices`, whose parts may be anything that
            TensorFlow makes a tensor of; values of the same row are summed.
        variable: variable of the model.
    """
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.cast(tf.convert_to_tensor(gradient.indices), tf.int64)
        shape = tf.constant(tuple(variable.shape), tf.int64)
        gradient = tf.scatter_nd(rows[:, tf.newaxis], gradient.values, shape)
    return tf.cast(gradient, variable.dtype)


def accumulate(
    tensors: Sequence[Tensor],
    gradients: Sequence[tf.Tensor],
    scales: Sequence[Scale],
    velocity: Sequence[Any] | None,
    residual: Sequence[Any] | None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[list, list, tf.Tensor]:
    """Drop gradients that are not finite, and correct, within the numbers' range.

    Args:
        tensors: descriptions of which size and dtype matter.
        gradients: gradient of each, of any shape, not yet multiplied by `scales`.
        scales: factor of each gradient, as `clipping.clip` returns it.
        velocity: variable of each, or None without momentum correction.
        residual: variable of each, or None if nothing is ever kept back.
        momentum: coefficient of the correction, in [0, 1).
        nesterov: whether the correction is Nesterov's.

    Returns:
        Velocity (or Nones) and residual (or the gradient), `[n]` of each tensor, and
        whether the gradient was finite and nothing overflowed.
    """
    flat = [
        tf.cast(tf.reshape(g, [t.size]), t.dtype)
        for g, t in zip(gradients, tensors, strict=True)
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
