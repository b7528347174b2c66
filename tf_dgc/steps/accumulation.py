"""Accumulation of gradients into velocity and residual, with TensorFlow operations.

Momentum correction (Lin et al., ICLR 2018, equations 4 to 7 and algorithm 4): momentum
applied to the sum of sparse gradients does not discount a delayed entry for the steps
of its delay. Accumulating the local velocity instead does.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf_dgc import clipping
from tf_dgc._internals import tracing
from tf_dgc.clipping import Scale
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps.preconditioning import Divisor

# Rows of a sparse gradient are ascending and distinct.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


def accumulate(
    tensors: Sequence[TensorSpec],
    gradients: Sequence[Gradient],
    scales: Sequence[Scale],
    velocity: Sequence[Any] | None,
    residual: Sequence[Any] | None,
    momentum: float = 0.0,
    nesterov: bool = False,
    divisors: Sequence[Divisor | None] = (),
    decay: float = 1.0,
) -> tuple[list[Any], list[Any], tf.Tensor]:
    """Return new velocities (or Nones) and residuals, `[n]`, and whether all is finite.

    Accumulates zeros if any gradient is not finite. Without `residual` it returns the
    gradients instead. `decay` is the factor of the residuals of compressed tensors.
    """
    flat, finite = scaled_dense_gradients(tensors, gradients, scales, divisors)
    if residual is None:
        return [None] * len(flat), flat, finite
    old_velocity = [_flat(v) for v in velocity] if velocity else [None] * len(flat)
    old_residual = [
        _flat(r) if t.uncompressed or decay == 1.0 else decay * _flat(r)
        for t, r in zip(tensors, residual, strict=True)
    ]

    def apply_rule(rule: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
        pairs = [
            rule(g, v, r, momentum, nesterov)
            for g, v, r in zip(flat, old_velocity, old_residual, strict=True)
        ]
        return [v for v, _ in pairs], [r for _, r in pairs]

    accumulated = apply_rule(accumulate_gradient)
    fits = clipping.all_finite(accumulated[1])
    new_velocity, new_residual = tf.cond(
        fits, lambda: accumulated, lambda: apply_rule(accumulate_without_overflow)
    )
    return new_velocity, new_residual, tf.logical_and(finite, fits)


def scaled_dense_gradients(
    tensors: Sequence[TensorSpec],
    gradients: Sequence[Gradient],
    scales: Sequence[Scale],
    divisors: Sequence[Divisor | None] = (),
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return scaled, divided gradients, `[n]`, or zeros, and whether all are finite."""
    flat = [flatten(g, t) for g, t in zip(gradients, tensors, strict=True)]
    flat, finite = clipping.multiply_or_zero(flat, scales)
    if divisors:
        pairs = zip(flat, divisors, strict=True)
        flat = [g if d is None else d.divide(g, finite) for g, d in pairs]
    return flat, finite


def divide(
    tensors: Sequence[TensorSpec],
    gradients: Sequence[Gradient],
    scales: Sequence[Scale],
    divisors: Sequence[Divisor | None],
) -> tuple[list[tf.Tensor], list[Scale]]:
    """Divide gradients for kernels that do not; scales are NaN if one is not finite."""
    flat, finite = scaled_dense_gradients(tensors, gradients, scales, divisors)
    return flat, [1.0 + clipping.nan_unless(finite)] * len(flat)


def accumulate_gradient(
    gradient: tf.Tensor,
    velocity: tf.Tensor | None,
    residual: tf.Tensor,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[tf.Tensor | None, tf.Tensor]:
    """Return the new velocity and residual of one tensor, `[n]`.

    Without velocity: `residual + gradient` (error feedback only). With it, equation 4
    (`velocity = m*velocity + gradient; residual += velocity`) or its Nesterov form
    (`velocity = m*(velocity + gradient); residual += velocity + gradient`).
    """
    if velocity is None:
        return None, residual + gradient
    if nesterov:
        velocity = momentum * (velocity + gradient)
        # Grappler would reorder a sum of three terms.
        increment = tf.raw_ops.Snapshot(input=velocity + gradient)
        return velocity, residual + increment
    velocity = momentum * velocity + gradient
    return velocity, residual + velocity


def accumulate_without_overflow(
    gradient: tf.Tensor,
    velocity: tf.Tensor | None,
    residual: tf.Tensor,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[tf.Tensor | None, tf.Tensor]:
    """Do the same as `accumulate_gradient` for entries whose residual stays finite.

    An entry that would overflow gets no gradient; one that would overflow by its
    momentum alone keeps its residual. So overflowed entries are never sent.
    """
    new_velocity, new_residual = accumulate_gradient(
        gradient, velocity, residual, momentum, nesterov
    )
    zero = tf.zeros_like(gradient)
    coasting_velocity, coasting_residual = accumulate_gradient(
        zero, velocity, residual, momentum, nesterov
    )
    fits = tf.math.is_finite(new_residual)
    fallback = tf.where(
        tf.math.is_finite(coasting_residual), coasting_residual, residual
    )
    if velocity is not None:
        new_velocity = tf.where(fits, new_velocity, coasting_velocity)
    return new_velocity, tf.where(fits, new_residual, fallback)


def clear_positions(buffer: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return `[n]` with zeros at distinct positions, int32 `[k]` (algorithm 4)."""
    zeros = tf.zeros_like(positions, buffer.dtype)
    return tf.tensor_scatter_nd_update(buffer, positions[:, tf.newaxis], zeros)


# Conversions of gradients.


def to_dense(gradient: Any, variable: keras.Variable) -> tf.Tensor:
    """Return a gradient, dense, in the variable's dtype; equal rows are summed."""
    return tf.cast(_densify(gradient, variable.shape), variable.dtype)


def to_rows(gradient: Any, variable: keras.Variable) -> Gradient:
    """Return a gradient in the variable's dtype; sparse rows ascending and distinct.

    In XLA, which needs static shapes, it returns a dense tensor.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tracing.in_xla_context():
        return to_dense(gradient, variable)
    indices = tf.cast(tf.convert_to_tensor(gradient.indices), tf.int64)
    rows = tf.sort(tf.unique(indices).y)
    segments = tf.searchsorted(rows, indices)
    sums = tf.math.unsorted_segment_sum(gradient.values, segments, tf.size(rows))
    return tf.IndexedSlices(tf.cast(sums, variable.dtype), rows)


def gradient_values(gradient: Gradient) -> tf.Tensor:
    """Return a dense gradient, or the values of a sparse one."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def flatten(gradient: Gradient, tensor: TensorSpec) -> tf.Tensor:
    """Return a gradient as a dense vector `[n]` in the accumulators' dtype."""
    dense = _densify(gradient, tensor.shape)
    return tf.cast(tf.reshape(dense, [tensor.size]), tensor.dtype)


def flatten_dense(gradient: Gradient, tensor: TensorSpec) -> Gradient:
    """Flatten a dense gradient; only cast a sparse one."""
    if not isinstance(gradient, tf.IndexedSlices):
        return flatten(gradient, tensor)
    return tf.IndexedSlices(tf.cast(gradient.values, tensor.dtype), gradient.indices)


def take_rows(
    gradient: Gradient, tensor: TensorSpec, positions: tf.Tensor
) -> tf.Tensor:
    """Return a gradient's entries at positions, int32 `[k]`, in its own dtype."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.gather(tf.reshape(gradient, [-1]), positions)
    length = tensor.size // tensor.shape[0]
    rows = tf.cast(positions // length, tf.int64)[:, tf.newaxis]
    # At most one sparse row matches each position; where none does, the entry is 0.
    outputs, row = tf.unstack(tf.where(tf.equal(rows, gradient.indices)), axis=1)
    values = tf.reshape(gradient.values, [-1, length])
    column = tf.cast(tf.gather(positions, outputs) % length, tf.int64)
    entries = tf.gather_nd(values, tf.stack([row, column], axis=1))
    shape = tf.shape(positions, tf.int64)
    return tf.scatter_nd(outputs[:, tf.newaxis], entries, shape)


def _densify(gradient: Any, shape: Sequence[int]) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.cast(tf.convert_to_tensor(gradient.indices), tf.int64)
    shape = tf.constant(tuple(shape), tf.int64)
    return tf.scatter_nd(rows[:, tf.newaxis], gradient.values, shape)


def _flat(variable: Any) -> tf.Tensor:
    return tf.reshape(variable.local(), [-1])
