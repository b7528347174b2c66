"""Precondition: divide a gradient by what Adam divides its sum by.

Adam's rule is not linear: of a sum that arrives every T steps it remembers the square,
and moves sqrt(T) times too little. Divided before it is accumulated, by a second moment
that every step has a part in, the gradient may wait like any other.
"""

import tensorflow as tf


def follow(
    moment: tf.Tensor, gradient: tf.Tensor, num_workers: int, beta_2: float
) -> tf.Tensor:
    """Return the second moment of the sum over workers, as far as one can tell.

    Where the noise of N gradients is independent, the square of their sum is N times
    that of one.

    Args:
        moment: second moment before, float `[n]`.
        gradient: gradient of this worker, divided by N, `[n]`.
        num_workers: number of workers, N.
        beta_2: share of the moment before, in [0, 1).
    """
    square = tf.minimum(num_workers * tf.square(gradient), gradient.dtype.max)
    return moment + (1.0 - beta_2) * (square - moment)


def denominator(
    moment: tf.Tensor, step: tf.Tensor, beta_2: float, epsilon: float
) -> tf.Tensor:
    """Return what Keras's Adam divides by, without its bias.

    Args:
        moment: second moment, float `[n]`.
        step: number of steps it is of, this one included, scalar float64.
        beta_2: share of the moment before, in each.
        epsilon: what is added to its root, so that none is 0.
    """
    known = 1.0 - tf.pow(tf.constant(beta_2, tf.float64), step)
    return (tf.sqrt(moment) + epsilon) / tf.cast(tf.sqrt(known), moment.dtype)
