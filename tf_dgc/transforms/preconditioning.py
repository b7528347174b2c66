"""Precondition: divide a gradient by what Adam divides its sum by.

Adam's rule is not linear: of a sum that arrives every T steps it remembers the square,
and moves sqrt(T) times too little. Divided before it is accumulated, by a second moment
that every step has a part in, the gradient may wait like any other.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.choice import Choice, choose


class Divisor(NamedTuple):
    """What a gradient is divided by: the root of its second moment.

    Attributes:
        moment: variable of the second moment of the sum over workers, as far as this
            one can tell.
        numbers: row of what `make_numbers` returns, float64 `[5]`.
        active: whether the gradient is divided in this step.
    """

    moment: Any
    numbers: tf.Tensor
    active: Choice

    def divide(self, gradient: tf.Tensor) -> tf.Tensor:
        """Let a gradient enter the moment, and return what is accumulated instead.

        The native operations do the same (`custom_ops/cpu/dividing.h`).

        Args:
            gradient: gradient of this worker, its share of the sum, float `[n]`.
        """
        return choose(self.active, lambda: self._divide(gradient), lambda: gradient)

    def _divide(self, gradient: tf.Tensor) -> tf.Tensor:
        now = follow(_flat(self.moment), gradient, self.numbers)
        self.moment.assign(tf.reshape(now, self.moment.shape))
        return quotient(gradient, now, self.numbers)


def make_numbers(
    factors: tf.Tensor,
    step: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    active: Choice,
) -> tf.Tensor:
    """Return the numbers of some divisors.

    Args:
        factors: square of the sum by that of one share, in the mean, float `[tensors]`:
            N for independent noise, `N**2` for equal ones.
        step: number of steps, this one included, scalar float64.
        beta_1: share of the momentum before, in each.
        beta_2: share of the moment before, in each.
        epsilon: number that is added to the root.
        active: whether gradients are divided in this step.

    Returns:
        float64 `[tensors, 5]`: the factor, 0 if not active; share of a square in the
        moment; epsilon; share of a quotient in the momentum, with the bias of the
        moment; and what none exceeds, also where the square is beyond all numbers.
    """
    factors = tf.cast(factors, tf.float64)
    known = 1.0 - tf.pow(tf.constant(beta_2, tf.float64), step)
    ones = tf.ones_like(factors)
    columns = [
        factors * tf.cast(active, tf.float64),
        (1.0 - beta_2) * ones,
        epsilon * ones,
        (1.0 - beta_1) * tf.sqrt(known) * ones,
        (1.0 - beta_1) * tf.sqrt(known / (1.0 - beta_2) / factors),
    ]
    return tf.stack(columns, axis=1)


def follow(moment: tf.Tensor, gradient: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Return the second moment of the sum over workers, as far as one can tell.

    Args:
        moment: second moment before, float `[n]`.
        gradient: gradient of this worker, its share of the sum, `[n]`.
        numbers: numbers of its divisor, float64 `[5]`; or `[r, 5]` where all else has
            so many rows, with a divisor each.
    """
    factor, rest, *_ = _columns(numbers, gradient.dtype)
    square = tf.minimum(factor * tf.square(gradient), gradient.dtype.max)
    return moment + rest * (square - moment)


def quotient(gradient: tf.Tensor, moment: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Return what is accumulated instead of a gradient.

    Args:
        gradient: gradient of this worker, `[n]`.
        moment: result of `follow`, which includes it, `[n]`.
        numbers: numbers as for `follow`.
    """
    *_, largest = _columns(numbers, gradient.dtype)
    return tf.clip_by_value(rescale(gradient, moment, numbers), -largest, largest)


def rescale(values: tf.Tensor, moment: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Return values of the scale of gradients in that of momentum, without bounds.

    Args:
        values: values, `[n]`.
        moment: second moment, `[n]`.
        numbers: numbers as for `follow`.
    """
    _, _, epsilon, share, _ = _columns(numbers, values.dtype)
    return tf.math.divide_no_nan(share * values, tf.sqrt(moment) + epsilon)


def _columns(numbers: tf.Tensor, dtype: tf.DType) -> list[tf.Tensor]:
    """Return five scalars, or columns `[r, 1]`."""
    given = tf.cast(numbers, dtype)
    if given.shape.rank == 1:
        return tf.unstack(given)
    return tf.split(given, 5, axis=1)


def _flat(moment: Any) -> tf.Tensor:
    return tf.reshape(moment.local(), [-1])
