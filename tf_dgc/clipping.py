"""Clip: bound the local gradient before it enters the residual.

Lin et al., ICLR 2018, section 3.2: the global threshold is scaled by `N**-0.5` on
each of `N` workers, so that the sum of `N` clipped independent gradients has the
norm that clipping the sum would allow.
"""

import math
from collections.abc import Sequence

import tensorflow as tf


def drop_nonfinite(
    gradients: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Replace all gradients by zeros if any of them is not finite.

    A NaN that entered `residual` would stay for ever, and a worker that skipped the
    exchange would leave the others waiting; contributing zeros does neither.

    Args:
        gradients: dense tensors of any shapes and float dtypes.

    Returns:
        The gradients (or zeros), and a scalar bool that is True if all were finite.
    """
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
    return [tf.where(finite, g, tf.zeros_like(g)) for g in gradients], finite


def clip(
    gradients: Sequence[tf.Tensor],
    num_workers: int,
    *,
    clipnorm: float | None = None,
    global_clipnorm: float | None = None,
    clipvalue: float | None = None,
) -> list[tf.Tensor]:
    """Clip local gradients; at most one of the three thresholds is set.

    Args:
        gradients: dense tensors of one step on this worker.
        num_workers: `N` of the paper; 1 clips as Keras does.
        clipnorm: bound of each tensor's L2 norm over all workers.
        global_clipnorm: bound of the L2 norm of all tensors together.
        clipvalue: bound of each entry's absolute value, not scaled by `N`.

    Returns:
        Tensors of the same shapes and dtypes.
    """
    scale = 1.0 / math.sqrt(num_workers)
    if clipnorm:
        return [tf.clip_by_norm(g, clipnorm * scale) for g in gradients]
    if global_clipnorm:
        return list(tf.clip_by_global_norm(gradients, global_clipnorm * scale)[0])
    if clipvalue:
        return [tf.clip_by_value(g, -clipvalue, clipvalue) for g in gradients]
    return list(gradients)
