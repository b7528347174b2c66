"""Clip: bound the local gradient before it enters the residual.

Lin et al., ICLR 2018, section 3.2: the global threshold is scaled by `N**-0.5` on
each of `N` workers, so that the sum of `N` clipped independent gradients has the
norm that clipping the sum would allow.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tf_dgc import native_library
from tf_dgc._internals import tracing

# A gradient waits to be multiplied: the pass that accumulates it does that on the way.
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
        loss_scale: factor that the loss, and so the gradients, were multiplied by.
        clipnorm: bound of each tensor's L2 norm over all workers.
        global_clipnorm: bound of the L2 norm of all tensors together.
        clipvalue: bound of each entry's absolute value, not scaled by `N`.

    Returns:
        Gradients, and what each is to be multiplied by: a float, or a scalar float64
        tensor that is NaN or Inf if the step's gradients must be left out.
    """
    unit = 1.0 / loss_scale if loss_scale else 1.0
    limit = 1.0 / math.sqrt(num_workers)
    if clipnorm:
        return list(gradients), [
            _bounding([g], clipnorm * limit, unit) for g in gradients
        ]
    if global_clipnorm:
        scale = _bounding(gradients, global_clipnorm * limit, unit)
        return list(gradients), [scale] * len(gradients)
    if clipvalue:
        # An infinite entry would be clipped to an ordinary one.
        gradients, finite = multiply_or_zero(gradients, [unit] * len(gradients))
        kept = 1.0 + nan_unless(finite)
        clipped = [tf.clip_by_value(g, -clipvalue, clipvalue) for g in gradients]
        return clipped, [kept] * len(clipped)
    return list(gradients), [unit] * len(gradients)


def multiply_or_zero(
    gradients: Sequence[tf.Tensor], scales: Sequence[Scale]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Multiply gradients, or return zeros if any entry is not finite then.

    A NaN that entered `residual` would stay for ever, and a worker that skipped the
    exchange would leave the others waiting; contributing zeros does neither.

    Args:
        gradients: dense tensors of any shapes and float dtypes.
        scales: factor of each, as `clip` returns it. Where one is a tensor, who made it
            has looked at all entries.

    Returns:
        The products (or zeros), and a scalar bool that is True if all were finite.
    """
    products = [_times(g, s) for g, s in zip(gradients, scales, strict=True)]
    pairs = list(zip(products, scales, strict=True))
    seen = _look_at(scales)
    unseen = [p for p, s in pairs if isinstance(s, float)]
    finite = tf.reduce_all([*seen, all_finite(unseen)])
    if not products:
        return products, finite
    kept = tf.cond(  # of which a branch that hands on copies nothing
        finite, lambda: products, lambda: [tf.zeros_like(p) for p in products]
    )
    return kept, finite


def _times(gradient: tf.Tensor, scale: Scale) -> tf.Tensor:
    if isinstance(scale, float):  # `tf.cast` would make float32 of it first
        return gradient if scale == 1.0 else gradient * scale
    return gradient * tf.cast(scale, gradient.dtype)


def scales_or_nan(
    gradients: Sequence[tf.Tensor], scales: Sequence[Scale], use_native: bool = False
) -> tf.Tensor:
    """Return the scales; all NaN, if one gradient is not finite when multiplied.

    What `multiply` does, for a pass that multiplies on the way and would notice too
    late: what was there before cannot be had back from a sum.

    Args:
        gradients: dense tensors of any shapes and float dtypes.
        scales: factor of each, as `clip` returns it. Where one is a tensor, who made it
            has looked at all entries.
        use_native: whether to look by the native operation, which is for CPUs.

    Returns:
        float64 `[tensors]`.
    """
    pairs = list(zip(gradients, scales, strict=True))
    seen = _look_at(scales)
    # As wide as what they are added to: a product may not fit into float16.
    unseen = [
        g if s <= 1 else _wide(g) * tf.cast(s, _wide(g).dtype)
        for g, s in pairs
        if isinstance(s, float)
    ]
    missing = nan_unless(tf.reduce_all([*seen, all_finite(unseen, use_native)]))
    if not seen:
        return tf.constant(scales, tf.float64) + missing
    if all(s is scales[0] for s in scales):  # hundreds of operations less
        return tf.fill([len(scales)], tf.cast(scales[0], tf.float64) + missing)
    return tf.stack([tf.cast(s, tf.float64) for s in scales]) + missing


def _look_at(scales: Sequence[Scale]) -> list[tf.Tensor]:
    """Return whether those are finite that are tensors, each of them once."""
    tensors = {id(s): s for s in scales if not isinstance(s, float)}
    return [tf.math.is_finite(s) for s in tensors.values()]


def nan_unless(kept: tf.Tensor) -> tf.Tensor:
    """Return 0, or NaN for what is left out, scalar float64.

    No constant NaN: `tf.debugging.enable_check_numerics` would find it in every step.
    """
    return tf.sqrt(tf.cast(kept, tf.float64) - 1.0)


def all_finite(tensors: Sequence[tf.Tensor], use_native: bool = False) -> tf.Tensor:
    """Return whether no entry is NaN or Inf, scalar bool.

    A sum is finite only if all that was added is, and adding reads memory once. Only
    where finite numbers overflow does each entry have to be looked at. The native
    operation looks at all of them, as fast as memory is read.
    """
    if use_native and tensors and not tracing.in_xla_context():
        return native_library.load_library().library.tf_dgc_all_finite(
            values=list(tensors)
        )
    sums: dict[tf.DType, list[tf.Tensor]] = {}
    for t in tensors:
        total = tf.reduce_sum(_wide(t))
        sums.setdefault(total.dtype, []).append(total)
    none = [tf.reduce_all(tf.math.is_finite(tf.stack(s))) for s in sums.values()]
    if not none:
        return tf.constant(True)
    return tf.cond(
        tf.reduce_all(none), lambda: tf.constant(True), lambda: _look_at_all(tensors)
    )


def _look_at_all(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if tf.executing_eagerly() or tracing.in_xla_context():
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(t)) for t in tensors])

    def look(*arrays: np.ndarray) -> np.bool_:
        return np.bool_(all(np.isfinite(a).all() for a in arrays))

    # One operation, as tracing hundreds takes time and this is hardly ever run.
    found = tf.numpy_function(look, list(tensors), tf.bool, stateful=False)
    return tf.ensure_shape(found, [])


def _bounding(gradients: Sequence[tf.Tensor], limit: float, unit: float) -> tf.Tensor:
    """Return the factor that bounds the norm of `unit * gradients`."""
    squares = [2.0 * _half_square(g) for g in gradients]
    norm = unit * tf.sqrt(tf.add_n(squares))
    scale = unit * limit / tf.maximum(norm, limit)
    return tf.where(tf.math.is_finite(norm), scale, norm)


def _half_square(gradient: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.nn.l2_loss(_wide(gradient)), tf.float64)


def _wide(values: tf.Tensor) -> tf.Tensor:
    wide = tf.float64 if values.dtype == tf.float64 else tf.float32
    return tf.cast(values, wide)
