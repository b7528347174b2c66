"""Precondition: divide a gradient by what Adam divides its sum by.

Adam's rule is not linear: of a sum that arrives every T steps it remembers the square,
and moves sqrt(T) times too little. Divided before it is accumulated, by a second moment
that every step has a part in, the gradient may wait like any other.
"""

import tensorflow as tf


def follow(
    moment: tf.Tensor, gradient: tf.Tensor, factor: tf.Tensor, beta_2: float
) -> tf.Tensor:
    """Return the second moment of the sum over workers, as far as one can tell.

    Args:
        moment: second moment before, float `[n]`.
        gradient: gradient of this worker, its share of the sum, `[n]`.
        factor: square of the sum by that of one share, in the mean, a scalar of the
            same dtype: N for independent noise, `N**2` for equal ones.
        beta_2: share of the moment before, in [0, 1).
    """
    square = tf.minimum(factor * tf.square(gradient), gradient.dtype.max)
    return moment + (1.0 - beta_2) * (square - moment)


def divide(
    gradient: tf.Tensor,
    divisor: tf.Tensor,
    step: tf.Tensor,
    factor: tf.Tensor,
    beta_2: float,
) -> tf.Tensor:
    """Return the quotient, in its bounds also where the square is beyond all numbers.

    Args:
        gradient: gradient of this worker, `[n]`, which its second moment includes.
        divisor: result of `denominator`, `[n]`.
        step: number of steps, this one included, scalar float64.
        factor: factor that `follow` was given.
        beta_2: share of the moment before, in [0, 1).
    """
    known = tf.cast(_known(beta_2, step) / (1.0 - beta_2), gradient.dtype)
    largest = tf.sqrt(known / factor)
    return tf.clip_by_value(gradient / divisor, -largest, largest)


def denominator(
    moment: tf.Tensor, step: tf.Tensor, beta_2: float, epsilon: float
) -> tf.Tensor:
    """Return what Keras's Adam divides by, without its bias.

    Args:
        moment: second moment, float `[n]`.
        step: number of steps it is of, this one included, scalar float64.
        beta_2: share of the moment before, in each.
        epsilon: number that is added to its root, so that none is 0.
    """
    known = tf.cast(tf.sqrt(_known(beta_2, step)), moment.dtype)
    return (tf.sqrt(moment) + epsilon) / known


def _known(beta_2: float, step: tf.Tensor) -> tf.Tensor:
    """Return the share of the steps there were in the moment, scalar float64."""
    return 1.0 - tf.pow(tf.constant(beta_2, tf.float64), step)
