"""Correct: momentum before accumulation, and masking after sending.

Lin et al., ICLR 2018, equations 4 to 7 and algorithm 4. With momentum applied to the
sum of sparse gradients, an entry that waited loses the discounting of the steps it
waited for; accumulating the local velocity instead keeps it.
"""

import tensorflow as tf


def correct(
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


def correct_within_range(
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
    wanted = correct(gradient, velocity, residual, momentum, nesterov)
    without = correct(tf.zeros_like(gradient), velocity, residual, momentum, nesterov)
    fits = tf.math.is_finite(wanted[1])
    kept = tf.where(tf.math.is_finite(without[1]), without[1], residual)
    new_velocity = velocity
    if velocity is not None:
        new_velocity = tf.where(fits, wanted[0], without[0])
    return new_velocity, tf.where(fits, wanted[1], kept)


def mask(buffer: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
    """Return `buffer` with zeros at the positions that were sent (algorithm 4).

    Args:
        buffer: velocity or residual, `[n]`.
        sent: positions that were sent, int32 `[k]`, distinct.
    """
    zeros = tf.zeros_like(sent, buffer.dtype)
    return tf.tensor_scatter_nd_update(buffer, sent[:, tf.newaxis], zeros)
