"""Gradient clipping, and checks for finite gradients.

Lin et al., ICLR 2018, section 3.2: each of `N` workers scales the global threshold by
`N**-0.5`, so that the sum of `N` clipped independent gradients has the norm that
clipping the sum would allow.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tf_dgc import native_library
from tf_dgc._internals import tracing

# Factor of a gradient. The pass that accumulates the gradient also multiplies it.
Scale: TypeAlias = float | tf.Tensor


def clip_gradients(
    gradients: Sequence[tf.Tensor],
    num_workers: int,
    *,
    loss_scale: float | None = None,
    clipnorm: float | None = None,
    global_clipnorm: float | None = None,
    clipvalue: float | None = None,
) -> tuple[list[tf.Tensor], list[Scale]]:
    """Clip local gradients; at most one of the three thresholds is set.

    Args:
        gradients: dense tensors of one step on this worker.
        num_workers: `N` of the paper; 1 clips as Keras does.
        loss_scale: factor by which the loss, and so the gradients, were multiplied.
        clipnorm: bound of each tensor's L2 norm over all workers.
        global_clipnorm: bound of the L2 norm of all tensors together.
        clipvalue: bound of each entry's absolute value, not scaled by `N`.

    Returns:
        Gradients, and the factor of each: a float, or a scalar float64 tensor that is
        NaN or Inf if the step's gradients must be dropped.
    """
    unit = 1.0 / loss_scale if loss_scale else 1.0
    threshold_scale = 1.0 / math.sqrt(num_workers)
    gradients = list(gradients)
    if clipnorm:
        threshold = clipnorm * threshold_scale
        return gradients, [_norm_scale([g], threshold, unit) for g in gradients]
    if global_clipnorm:
        scale = _norm_scale(gradients, global_clipnorm * threshold_scale, unit)
        return gradients, [scale] * len(gradients)
    if clipvalue:
        # Clipping would turn an infinite entry into an ordinary one.
        gradients, finite = multiply_or_zero(gradients, [unit] * len(gradients))
        clipped = [tf.clip_by_value(g, -clipvalue, clipvalue) for g in gradients]
        return clipped, [1.0 + nan_unless(finite)] * len(clipped)
    return gradients, [unit] * len(gradients)


def _norm_scale(
    gradients: Sequence[tf.Tensor], threshold: float, unit: float
) -> tf.Tensor:
    """Return the factor that bounds the norm of `unit * gradients`."""
    squares = [
        2.0 * tf.cast(tf.nn.l2_loss(_at_least_float32(g)), tf.float64)
        for g in gradients
    ]
    norm = unit * tf.sqrt(tf.add_n(squares))
    scale = unit * threshold / tf.maximum(norm, threshold)
    return tf.where(tf.math.is_finite(norm), scale, norm)


def multiply_or_zero(
    gradients: Sequence[tf.Tensor], scales: Sequence[Scale]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Multiply gradients by their scales, or return zeros if any product is not finite.

    A NaN in `residual` would stay forever, and a worker that skipped the exchange would
    leave the others waiting; contributing zeros avoids both.

    Args:
        gradients: dense tensors of any shapes and float dtypes.
        scales: factor of each, from `clip_gradients`. A tensor is finite only if all
            entries of its gradient are.

    Returns:
        The products or zeros, and a scalar bool that is True if all were finite.
    """
    products = [_multiply(g, s) for g, s in zip(gradients, scales, strict=True)]
    unchecked = [
        p for p, s in zip(products, scales, strict=True) if isinstance(s, float)
    ]
    finite = tf.reduce_all([*_finite_scales(scales), all_finite(unchecked)])
    if not products:
        return products, finite
    # The branch that returns the products copies nothing.
    products = tf.cond(
        finite, lambda: products, lambda: [tf.zeros_like(p) for p in products]
    )
    return products, finite


def _multiply(gradient: tf.Tensor, scale: Scale) -> tf.Tensor:
    if isinstance(scale, float):  # `tf.cast` would round it to float32 first
        return gradient if scale == 1.0 else gradient * scale
    return gradient * tf.cast(scale, gradient.dtype)


def scales_or_nan(
    gradients: Sequence[tf.Tensor], scales: Sequence[Scale], use_native: bool = False
) -> tf.Tensor:
    """Return the scales, or NaNs if any gradient times its scale is not finite.

    For passes that multiply and accumulate in place, which cannot undo a sum once they
    find a NaN. Otherwise as `multiply_or_zero`.

    Args:
        gradients: dense tensors of any shapes and float dtypes.
        scales: factor of each, as for `multiply_or_zero`.
        use_native: whether to check by the native operation, which is for CPUs.

    Returns:
        float64 `[tensors]`.
    """
    # In the dtype of the accumulators: a product may overflow float16.
    unchecked = [
        g if s <= 1 else _at_least_float32(g) * tf.cast(s, _at_least_float32(g).dtype)
        for g, s in zip(gradients, scales, strict=True)
        if isinstance(s, float)
    ]
    finite_scales = _finite_scales(scales)
    zero_or_nan = nan_unless(
        tf.reduce_all([*finite_scales, all_finite(unchecked, use_native)])
    )
    if not finite_scales:
        return tf.constant(scales, tf.float64) + zero_or_nan
    if all(s is scales[0] for s in scales):  # saves hundreds of operations
        return tf.fill([len(scales)], tf.cast(scales[0], tf.float64) + zero_or_nan)
    return tf.stack([tf.cast(s, tf.float64) for s in scales]) + zero_or_nan


def _finite_scales(scales: Sequence[Scale]) -> list[tf.Tensor]:
    """Return whether each distinct tensor among the scales is finite."""
    tensors = {id(s): s for s in scales if not isinstance(s, float)}
    return [tf.math.is_finite(s) for s in tensors.values()]


def nan_unless(condition: tf.Tensor) -> tf.Tensor:
    """Return 0 if the condition holds, else NaN; scalar float64.

    It is computed, as `tf.debugging.enable_check_numerics` would report a constant NaN
    in every step.
    """
    return tf.sqrt(tf.cast(condition, tf.float64) - 1.0)


def all_finite(tensors: Sequence[tf.Tensor], use_native: bool = False) -> tf.Tensor:
    """Return whether no entry is NaN or Inf, scalar bool.

    A finite sum has finite terms, and summing reads memory once. Entries are checked
    one by one only if a sum is not finite, as finite terms may overflow. The native
    operation checks all entries at the speed of memory.
    """
    if use_native and tensors and not tracing.in_xla_context():
        return native_library.load_library().library.tf_dgc_all_finite(
            values=list(tensors)
        )
    if not tensors:
        return tf.constant(True)
    sums: dict[tf.DType, list[tf.Tensor]] = {}
    for t in tensors:
        total = tf.reduce_sum(_at_least_float32(t))
        sums.setdefault(total.dtype, []).append(total)
    finite_sums = [tf.reduce_all(tf.math.is_finite(tf.stack(s))) for s in sums.values()]
    return tf.cond(
        tf.reduce_all(finite_sums),
        lambda: tf.constant(True),
        lambda: _check_entries(tensors),
    )


def _check_entries(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if tf.executing_eagerly() or tracing.in_xla_context():
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(t)) for t in tensors])

    def check(*arrays: np.ndarray) -> np.bool_:
        return np.bool_(all(np.isfinite(a).all() for a in arrays))

    # One operation: tracing hundreds takes time, and this rarely runs.
    finite = tf.numpy_function(check, list(tensors), tf.bool, stateful=False)
    return tf.ensure_shape(finite, [])


def _at_least_float32(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, tf.float64 if values.dtype == tf.float64 else tf.float32)
