"""Precondition: divide a gradient by what Adam divides its sum by.

Adam's rule is not linear: of a sum that arrives every T steps it remembers the square,
and moves sqrt(T) times too little. Divided before it is accumulated, by a second moment
that every step has a part in, the gradient may wait like any other. Three of Adam's
kind divide by something else: AMSGrad by the largest second moment so far, Adamax by
the largest magnitude, which fades; and a Nadam looks ahead of its momentum.
"""

import functools
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.smart_cond import BoolOrTensor, smart_cond


class LookAhead(NamedTuple):
    """A momentum of quotients, of which more is accumulated than it is (Nesterov's).

    Attributes:
        velocity: variable of the momentum.
        momentum: share of the momentum before, in each.
        numbers: shares of the momentum, and of the quotient beside it, in what is
            accumulated, float64 `[2]`.
    """

    velocity: Any
    momentum: float
    numbers: tf.Tensor

    def follow(self, divided: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
        """Let a quotient enter the momentum, and return what is accumulated instead.

        Args:
            divided: quotient of this worker, float `[n]`.
            finite: whether there is a gradient in this step; else nothing is
                accumulated, and the momentum stays.
        """
        before = _flat(self.velocity)
        now = self.momentum * before + divided
        kept = tf.where(finite, now, before)
        self.velocity.assign(tf.reshape(kept, self.velocity.shape))
        of_momentum, of_quotient = tf.unstack(tf.cast(self.numbers, now.dtype))
        ahead = of_momentum * now + of_quotient * divided
        return tf.where(finite, ahead, tf.zeros_like(ahead))


class Divisor(NamedTuple):
    """What a gradient is divided by: the root of its second moment.

    Attributes:
        moment: variable of the second moment of the sum over workers, as far as this
            one can tell; with `infinity`, of its largest magnitude.
        numbers: row of what `make_numbers` or `make_infinity_numbers` returns, float64
            `[5]`.
        active: whether the gradient is divided in this step.
        largest: variable of the largest second moment so far, whose root it is then;
            or None.
        infinity: whether the moment is the largest magnitude, which fades.
        ahead: momentum that looks ahead; or None.
    """

    moment: Any
    numbers: tf.Tensor
    active: BoolOrTensor
    largest: Any = None
    infinity: bool = False
    ahead: LookAhead | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is Adam's own, which the native operations know."""
        return self.largest is None and not self.infinity and self.ahead is None

    def divide(self, gradient: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
        """Let a gradient enter the moment, and return what is accumulated instead.

        The native operations do the same (`custom_ops/cpu/dividing.h`).

        Args:
            gradient: gradient of this worker, its share of the sum, float `[n]`.
            finite: whether it was finite; else it is zero.
        """
        divided = functools.partial(self._divide, gradient, finite)
        return smart_cond(self.active, divided, lambda: gradient)

    def _divide(self, gradient: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
        now = update_moment(_flat(self.moment), gradient, self.numbers, self.infinity)
        self.moment.assign(tf.reshape(now, self.moment.shape))
        if self.largest is not None:
            now = tf.maximum(_flat(self.largest), now)
            self.largest.assign(tf.reshape(now, self.largest.shape))
        divided = divided_gradient(gradient, now, self.numbers, self.infinity)
        return divided if self.ahead is None else self.ahead.follow(divided, finite)


def divisor_numbers(
    factors: tf.Tensor,
    step: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float | tf.Tensor,
    active: BoolOrTensor,
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


def infinity_divisor_numbers(
    factors: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    active: BoolOrTensor,
) -> tf.Tensor:
    """Return the numbers of some divisors that are largest magnitudes.

    Arguments are those of `make_numbers`.

    Returns:
        float64 `[tensors, 5]`: the root of the factor, 0 if not active; what a
        magnitude fades by; epsilon; share of a quotient in the momentum; and what none
        exceeds.
    """
    roots = tf.sqrt(tf.cast(factors, tf.float64))
    ones = tf.ones_like(roots)
    columns = [
        roots * tf.cast(active, tf.float64),
        (1.0 - beta_2) * ones,
        epsilon * ones,
        (1.0 - beta_1) * ones,
        (1.0 - beta_1) / roots,
    ]
    return tf.stack(columns, axis=1)


def scale_divisors(numbers: tf.Tensor, rate: Any) -> tf.Tensor:
    """Return the numbers of divisors whose quotients are multiplied by a rate.

    Args:
        numbers: numbers as `make_numbers` returns them.
        rate: learning rate, a scalar.
    """
    ones = tf.ones([], tf.float64)
    rate = tf.cast(rate, tf.float64)
    return numbers * tf.stack([ones, ones, ones, rate, tf.abs(rate)])


def update_moment(
    moment: tf.Tensor, gradient: tf.Tensor, numbers: tf.Tensor, infinity: bool = False
) -> tf.Tensor:
    """Return the second moment of the sum over workers, as far as one can tell.

    Args:
        moment: second moment before, float `[n]`.
        gradient: gradient of this worker, its share of the sum, `[n]`.
        numbers: numbers of its divisor, float64 `[5]`; or `[r, 5]` where all else has
            so many rows, with a divisor each.
        infinity: whether it is the largest magnitude.
    """
    factor, rest, *_ = _columns(numbers, gradient.dtype)
    if infinity:
        size = tf.minimum(factor * tf.abs(gradient), gradient.dtype.max)
        return tf.maximum(moment - rest * moment, size)
    square = tf.minimum(factor * tf.square(gradient), gradient.dtype.max)
    return moment + rest * (square - moment)


def divided_gradient(
    gradient: tf.Tensor, moment: tf.Tensor, numbers: tf.Tensor, infinity: bool = False
) -> tf.Tensor:
    """Return what is accumulated instead of a gradient.

    Args:
        gradient: gradient of this worker, `[n]`.
        moment: result of `follow`, which includes it, or the largest so far, `[n]`.
        numbers: numbers as for `follow`.
        infinity: whether the moment is the largest magnitude.
    """
    *_, largest = _columns(numbers, gradient.dtype)
    divided = rescale(gradient, moment, numbers, infinity)
    return tf.clip_by_value(divided, -largest, largest)


def rescale(
    values: tf.Tensor, moment: tf.Tensor, numbers: tf.Tensor, infinity: bool = False
) -> tf.Tensor:
    """Return values of the scale of gradients in that of momentum, without bounds.

    Args:
        values: values, `[n]`.
        moment: second moment, `[n]`.
        numbers: numbers as for `follow`.
        infinity: whether the moment is the largest magnitude.
    """
    _, _, epsilon, share, _ = _columns(numbers, values.dtype)
    root = moment if infinity else tf.sqrt(moment)
    return tf.math.divide_no_nan(share * values, root + epsilon)


def _columns(numbers: tf.Tensor, dtype: tf.DType) -> list[tf.Tensor]:
    """Return five scalars, or columns `[r, 1]`."""
    given = tf.cast(numbers, dtype)
    if given.shape.rank == 1:
        return tf.unstack(given)
    return tf.split(given, 5, axis=1)


def _flat(moment: Any) -> tf.Tensor:
    return tf.reshape(moment.local(), [-1])
