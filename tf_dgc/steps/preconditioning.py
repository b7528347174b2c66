"""Preconditioning: gradients are divided by Adam's denominator before accumulation.

Adam's rule is not linear. For a sum that arrives every T steps it stores the square of
the sum, and its update is sqrt(T) times too small. A gradient that is divided before
accumulation, by a second moment updated in every step, may be delayed like any other.
AMSGrad divides by the largest second moment so far, and Adamax by a decaying maximum of
magnitudes; Nadam accumulates a Nesterov momentum.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc.conditions import BoolOrTensor, smart_cond


class LookAhead(NamedTuple):
    """Nesterov momentum of quotients (Nadam)."""

    velocity: Any
    momentum: float  # decay of the momentum in each step
    numbers: tf.Tensor  # weights of momentum and quotient, float64 `[2]`

    def update(self, quotient: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
        """Add a quotient to the momentum; return the value to accumulate."""
        old = _flat(self.velocity)
        new = self.momentum * old + quotient
        self.velocity.assign(
            tf.reshape(tf.where(finite, new, old), self.velocity.shape)
        )
        momentum_weight, quotient_weight = tf.unstack(tf.cast(self.numbers, new.dtype))
        value = momentum_weight * new + quotient_weight * quotient
        return tf.where(finite, value, tf.zeros_like(value))


class Divisor(NamedTuple):
    """The denominator of one tensor's gradient: the root of its second moment.

    Attributes:
        moment: variable of the second moment of the sum over workers, estimated on this
            worker; with `infinity`, of the largest magnitude.
        numbers: row of the result of `divisor_numbers` or `infinity_divisor_numbers`,
            float64 `[5]`.
        active: whether the gradient is divided in this step.
        largest: variable of the largest second moment so far, which replaces the second
            moment (AMSGrad); or None.
        infinity: whether the moment is a decaying maximum of magnitudes (Adamax).
        ahead: Nesterov momentum (Nadam); or None.
    """

    moment: Any
    numbers: tf.Tensor
    active: BoolOrTensor
    largest: Any = None
    infinity: bool = False
    ahead: LookAhead | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is Adam's own, which the native operations support."""
        return self.largest is None and not self.infinity and self.ahead is None

    def divide(self, gradient: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
        """Add a gradient to the moment, and return the value to accumulate, `[n]`.

        The gradient is this worker's share of the sum, zeros if it is not finite. The
        native operations do the same (`custom_ops/cpu/dividing.h`).
        """
        return smart_cond(
            self.active, lambda: self._divide(gradient, finite), lambda: gradient
        )

    def _divide(self, gradient: tf.Tensor, finite: tf.Tensor) -> tf.Tensor:
        moment = update_moment(
            _flat(self.moment), gradient, self.numbers, self.infinity
        )
        self.moment.assign(tf.reshape(moment, self.moment.shape))
        if self.largest is not None:
            moment = tf.maximum(_flat(self.largest), moment)
            self.largest.assign(tf.reshape(moment, self.largest.shape))
        quotient = divided_gradient(gradient, moment, self.numbers, self.infinity)
        return quotient if self.ahead is None else self.ahead.update(quotient, finite)


def divisor_numbers(
    factors: tf.Tensor,
    step: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float | tf.Tensor,
    active: BoolOrTensor,
) -> tf.Tensor:
    """Return the numbers of each tensor's divisor, float64 `[tensors, 5]`.

    `factors` is the expected square of the sum over workers divided by that of one
    worker's share: N for independent noise, `N**2` for equal shares. `step` counts this
    step, too. The numbers: the factor, 0 if not active; weight of the square in the
    moment; epsilon; weight of the quotient in the momentum, times the root of the
    moment's bias correction; bound of the quotient's magnitude, which also holds where
    the square overflows.
    """
    factors = tf.cast(factors, tf.float64)
    bias = 1.0 - tf.pow(tf.constant(beta_2, tf.float64), step)
    ones = tf.ones_like(factors)
    columns = [
        factors * tf.cast(active, tf.float64),
        (1.0 - beta_2) * ones,
        epsilon * ones,
        (1.0 - beta_1) * tf.sqrt(bias) * ones,
        (1.0 - beta_1) * tf.sqrt(bias / (1.0 - beta_2) / factors),
    ]
    return tf.stack(columns, axis=1)


def infinity_divisor_numbers(
    factors: tf.Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    active: BoolOrTensor,
) -> tf.Tensor:
    """Return the numbers of divisors that are decaying maxima (Adamax).

    As `divisor_numbers`: root of the factor, 0 if not active; share by which the
    maximum decays; epsilon; weight of the quotient in the momentum; its bound.
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
    """Return the numbers of divisors whose quotients are scaled by a learning rate."""
    ones = tf.ones([], tf.float64)
    rate = tf.cast(rate, tf.float64)
    return numbers * tf.stack([ones, ones, ones, rate, tf.abs(rate)])


def update_moment(
    moment: tf.Tensor, gradient: tf.Tensor, numbers: tf.Tensor, infinity: bool = False
) -> tf.Tensor:
    """Return the new second moment of the sum over workers, estimated on one.

    Moment and gradient are `[n]` with `[5]` numbers, or have r rows with `[r, 5]`.
    """
    factor, weight, *_ = _columns(numbers, gradient.dtype)
    if infinity:
        magnitude = tf.minimum(factor * tf.abs(gradient), gradient.dtype.max)
        return tf.maximum(moment - weight * moment, magnitude)
    square = tf.minimum(factor * tf.square(gradient), gradient.dtype.max)
    return moment + weight * (square - moment)


def divided_gradient(
    gradient: tf.Tensor, moment: tf.Tensor, numbers: tf.Tensor, infinity: bool = False
) -> tf.Tensor:
    """Return a gradient divided by its moment (which includes it), bounded."""
    *_, bound = _columns(numbers, gradient.dtype)
    quotient = rescale(gradient, moment, numbers, infinity)
    return tf.clip_by_value(quotient, -bound, bound)


def rescale(
    values: tf.Tensor, moment: tf.Tensor, numbers: tf.Tensor, infinity: bool = False
) -> tf.Tensor:
    """Return values in the units of gradients in those of the momentum, not bounded."""
    _, _, epsilon, weight, _ = _columns(numbers, values.dtype)
    root = moment if infinity else tf.sqrt(moment)
    return tf.math.divide_no_nan(weight * values, root + epsilon)


def _columns(numbers: tf.Tensor, dtype: tf.DType) -> list[tf.Tensor]:
    """Return five scalars, or columns `[r, 1]`."""
    numbers = tf.cast(numbers, dtype)
    if numbers.shape.rank == 1:
        return list(tf.unstack(numbers))
    return list(tf.split(numbers, 5, axis=1))


def _flat(variable: Any) -> tf.Tensor:
    return tf.reshape(variable.local(), [-1])
