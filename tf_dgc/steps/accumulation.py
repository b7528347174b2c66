"""Accumulation: a gradient into velocity and residual, by TensorFlow operations."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tf_dgc import clipping
from tf_dgc._internals import tracing
from tf_dgc.clipping import Scale
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps.preconditioning import Divisor

# --- Correct: momentum before accumulation, and masking after sending.
#
# Lin et al., ICLR 2018, equations 4 to 7 and algorithm 4. With momentum applied to the
# sum of sparse gradients, an entry that waited loses the discounting of the steps it
# waited for; accumulating the local velocity instead keeps it.


def accumulate_gradient(
    gradient: tf.Tensor,
    velocity: tf.Tensor | None,
    residual: tf.Tensor,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[tf.Tensor | None, tf.Tensor]:
    """Accumulate a gradient locally.

    Without velocity: `residual + gradient` (error feedback only). With it, equation 4
    (`velocity = m*velocity + gradient; residual += velocity`) or its Nesterov form
    (`velocity = m*(velocity + gradient); residual += velocity + gradient`).

    Args:
        gradient: gradient of one tensor, float `[n]`.
        velocity: velocity before, `[n]`, or None for no momentum correction.
        residual: residual before, `[n]`.
        momentum: coefficient in [0, 1).
        nesterov: whether to use the Nesterov form.

    Returns:
        The new velocity (None if there was none) and the new residual.
    """
    if velocity is None:
        return None, residual + gradient
    if nesterov:
        velocity = momentum * (velocity + gradient)
        # Grappler would add three terms in an order of its own.
        added = tf.raw_ops.Snapshot(input=velocity + gradient)
        return velocity, residual + added
    velocity = momentum * velocity + gradient
    return velocity, residual + velocity


def accumulate_without_overflow(
    gradient: tf.Tensor,
    velocity: tf.Tensor | None,
    residual: tf.Tensor,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[tf.Tensor | None, tf.Tensor]:
    """Do what `correct` does, where the residual does not overflow by it.

    An entry that would overflow gets no gradient; one that would by its momentum alone
    keeps its residual. So nothing that overflows is ever sent.
    """
    wanted = accumulate_gradient(gradient, velocity, residual, momentum, nesterov)
    without = accumulate_gradient(
        tf.zeros_like(gradient), velocity, residual, momentum, nesterov
    )
    fits = tf.math.is_finite(wanted[1])
    kept = tf.where(tf.math.is_finite(without[1]), without[1], residual)
    new_velocity = velocity
    if velocity is not None:
        new_velocity = tf.where(fits, wanted[0], without[0])
    return new_velocity, tf.where(fits, wanted[1], kept)


def clear_positions(buffer: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
    """Return `buffer` with zeros at the positions that were sent (algorithm 4).

    Args:
        buffer: velocity or residual, `[n]`.
        sent: positions that were sent, int32 `[k]`, distinct.
    """
    zeros = tf.zeros_like(sent, buffer.dtype)
    return tf.tensor_scatter_nd_update(buffer, sent[:, tf.newaxis], zeros)


# A sparse one has ascending and distinct rows.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


def to_dense(gradient: Any, variable: keras.Variable) -> tf.Tensor:
    """Return a gradient as a tensor of the variable's type.

    Args:
        gradient: a tensor or `tf.IndexedSlices`, whose parts may be anything that
            TensorFlow makes a tensor of; values of the same row are summed.
        variable: variable of the model.
    """
    return tf.cast(_spread(gradient, variable.shape), variable.dtype)


def to_rows(gradient: Any, variable: keras.Variable) -> Gradient:
    """Return a gradient of the variable's type, sparse if it was.

    Args:
        gradient: a tensor or `tf.IndexedSlices`, as for `to_dense`.
        variable: variable of the model.

    Returns:
        A tensor; or `tf.IndexedSlices` whose int64 indices are ascending and distinct,
        with the sum of the values of each row. Within XLA, where shapes are fixed, a
        tensor.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tracing.in_xla_context():
        return to_dense(gradient, variable)
    given = tf.cast(tf.convert_to_tensor(gradient.indices), tf.int64)
    rows = tf.sort(tf.unique(given).y)
    places = tf.searchsorted(rows, given)
    sums = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(tf.cast(sums, variable.dtype), rows)


def gradient_values(gradient: Gradient) -> tf.Tensor:
    """Return what there is of a gradient: all entries, or those of its rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def flatten(gradient: Gradient, tensor: TensorSpec) -> tf.Tensor:
    """Return all entries of a gradient, `[n]`, as what is accumulated."""
    whole = _spread(gradient, tensor.shape)
    return tf.cast(tf.reshape(whole, [tensor.size]), tensor.dtype)


def flatten_dense(gradient: Gradient, tensor: TensorSpec) -> Gradient:
    """Return a gradient as what is accumulated, `[n]`; the rows of a sparse one."""
    if not isinstance(gradient, tf.IndexedSlices):
        return flatten(gradient, tensor)
    return tf.IndexedSlices(tf.cast(gradient.values, tensor.dtype), gradient.indices)


def _spread(gradient: Any, shape: Sequence[int]) -> Any:
    """Return a gradient of a shape; what is no row of a sparse one is zero."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.cast(tf.convert_to_tensor(gradient.indices), tf.int64)
    shape = tf.constant(tuple(shape), tf.int64)
    return tf.scatter_nd(rows[:, tf.newaxis], gradient.values, shape)


def take_rows(
    gradient: Gradient, tensor: TensorSpec, positions: tf.Tensor
) -> tf.Tensor:
    """Return some entries of a gradient, `[k]`, of its own type.

    Args:
        gradient: gradient, as `to_rows` returns it or of any shape.
        tensor: description of which the shape matters.
        positions: positions within the tensor, int32 `[k]`.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.gather(tf.reshape(gradient, [-1]), positions)
    length = tensor.size // tensor.shape[0]
    wanted = tf.cast(positions // length, tf.int64)[:, tf.newaxis]
    # Of the rows there is one at most that is wanted; a sum of none is 0.
    place, row = tf.unstack(tf.where(tf.equal(wanted, gradient.indices)), axis=1)
    values = tf.reshape(gradient.values, [-1, length])
    column = tf.cast(tf.gather(positions, place) % length, tf.int64)
    found = tf.gather_nd(values, tf.stack([row, column], axis=1))
    shape = tf.shape(positions, tf.int64)
    return tf.scatter_nd(place[:, tf.newaxis], found, shape)


def scaled_dense_gradients(
    tensors: Sequence[TensorSpec],
    gradients: Sequence[Gradient],
    scales: Sequence[Scale],
    divisors: Sequence[Divisor | None] = (),
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Drop gradients that are not finite, and divide what is to be divided.

    Args:
        tensors: descriptions of which size and dtype matter.
        gradients: gradient of each, as `to_rows` returns it or of any shape, not yet
            multiplied by `scales`.
        scales: factor of each gradient, as `clipping.clip` returns it.
        divisors: divisor of each, or None; nothing for none at all.

    Returns:
        What is accumulated of each tensor, `[n]`, and whether the gradient was finite.
    """
    flat = [flatten(g, t) for g, t in zip(gradients, tensors, strict=True)]
    flat, finite = clipping.multiply_or_zero(flat, scales)
    by = divisors or [None] * len(flat)
    pairs = zip(flat, by, strict=True)
    return [g if d is None else d.divide(g, finite) for g, d in pairs], finite


def divide(
    tensors: Sequence[TensorSpec],
    gradients: Sequence[Gradient],
    scales: Sequence[Scale],
    divisors: Sequence[Divisor | None],
) -> tuple[list[tf.Tensor], list[Scale]]:
    """Return gradients and scales with divisions done, for kernels that know none.

    Arguments are those of `prepare`; a gradient that is not finite has a scale of NaN.
    """
    given, finite = scaled_dense_gradients(tensors, gradients, scales, divisors)
    return given, [1.0 + clipping.nan_unless(finite)] * len(given)


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
) -> tuple[list, list, tf.Tensor]:
    """Drop gradients that are not finite, and correct, within the numbers' range.

    Args:
        tensors: descriptions of which size and dtype matter.
        gradients: gradient of each, as `to_rows` returns it or of any shape, not yet
            multiplied by `scales`.
        scales: factor of each gradient, as `clipping.clip` returns it.
        velocity: variable of each, or None without momentum correction.
        residual: variable of each, or None if nothing is ever kept back.
        momentum: coefficient of the correction, in [0, 1).
        nesterov: whether the correction is Nesterov's.
        divisors: divisor of each gradient, or None; nothing for none at all.
        decay: share of the residual of what is not exempt that is not forgotten.

    Returns:
        Velocity (or Nones) and residual (or the gradient), `[n]` of each tensor, and
        whether the gradient was finite and nothing overflowed.
    """
    flat, finite = scaled_dense_gradients(tensors, gradients, scales, divisors)
    if residual is None:
        return [None] * len(flat), flat, finite
    old_velocity = [_flat(v) for v in velocity or [None] * len(flat)]
    kept = zip(tensors, residual, strict=True)
    old_residual = [_remembered(r, 1.0 if t.uncompressed else decay) for t, r in kept]

    def all_by(rule: Callable) -> tuple[list, list]:
        parts = zip(flat, old_velocity, old_residual, strict=True)
        pairs = [rule(g, v, r, momentum, nesterov) for g, v, r in parts]
        return [v for v, _ in pairs], [r for _, r in pairs]

    corrected = all_by(accumulate_gradient)
    fits = clipping.all_finite(corrected[1])
    new_velocity, new_residual = tf.cond(
        fits, lambda: corrected, lambda: all_by(accumulate_without_overflow)
    )
    return new_velocity, new_residual, tf.logical_and(finite, fits)


def _flat(variable: Any) -> tf.Tensor | None:
    return None if variable is None else tf.reshape(variable.local(), [-1])


def _remembered(residual: Any, decay: float) -> tf.Tensor:
    flat = tf.reshape(residual.local(), [-1])
    return flat if decay == 1.0 else decay * flat
