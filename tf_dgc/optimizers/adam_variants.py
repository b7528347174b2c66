"""Kinds of Adam that are corrected, and the numbers of each."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc._internals import keras_rules
from tf_dgc.smart_cond import BoolOrTensor
from tf_dgc.steps import preconditioning
from tf_dgc.steps.base import StepInputs
from tf_dgc.steps.preconditioning import LookAhead


class AdamVariant(NamedTuple):
    """What a kind of Adam does otherwise than Adam.

    Attributes:
        rule: name of its rule, of `keras_rules`.
        largest: whether it divides by the root of the largest second moment so far
            (AMSGrad).
        infinity: whether it divides by the largest magnitude, which fades (Adamax).
        ahead: whether it looks ahead of its momentum (Nadam).
    """

    rule: str
    largest: bool = False
    infinity: bool = False
    ahead: bool = False

    @property
    def native_rule(self) -> str | None:
        """Name of the rule if the native operations know it."""
        return None if self.infinity or self.ahead else self.rule


_KINDS = {
    kind.rule: kind
    for kind in (
        AdamVariant("adam"),
        AdamVariant("adam_amsgrad", largest=True),
        AdamVariant("adamax", infinity=True),
        AdamVariant("nadam", ahead=True),
    )
}
# A Nadam's momentum is half as much at first, and what it lacks fades. Keras keeps the
# product of momenta in a variable that it does not save: it follows from the step.
_LACKS = 0.5 * 0.96 ** np.arange(1001.0)
_LACKS[0] = 0.0
_PRODUCTS = np.cumprod(1.0 - _LACKS)


def find_adam_variant(optimizer: Any) -> AdamVariant | None:
    """Return what kind an optimizer is, if a whole step is that of Keras's own.

    Args:
        optimizer: any Keras optimizer.
    """
    name = keras_rules.adam_name(optimizer)
    return None if name is None else _KINDS[name]


def step_divisor_numbers(
    kind: AdamVariant,
    optimizer: Any,
    momentum: float,
    factors: tf.Tensor,
    active: BoolOrTensor,
) -> tf.Tensor:
    """Return the numbers of divisors in this step, float64 `[tensors, 5]`.

    Args:
        kind: kind of Adam.
        optimizer: inner optimizer, built.
        momentum: coefficient of the momentum before what waits.
        factors: factors as for `preconditioning.make_numbers`.
        active: whether gradients are divided in this step.
    """
    betas = momentum, float(optimizer.beta_2)
    epsilon, step = optimizer.epsilon, _step(optimizer)
    if kind.infinity:
        own = *betas, epsilon, active
        return preconditioning.infinity_divisor_numbers(factors, *own)
    if kind.ahead:  # added to the root of what is corrected for bias already
        epsilon = epsilon * tf.sqrt(1.0 - _power(betas[1], step))
    return preconditioning.divisor_numbers(factors, step, *betas, epsilon, active)


def bias_correction(kind: AdamVariant, optimizer: Any, momentum: float) -> tf.Tensor:
    """Return the share of a sum of updates that there is, scalar float64.

    Args:
        kind: kind of Adam.
        optimizer: inner optimizer, built.
        momentum: coefficient of the momentum before what waits.
    """
    if kind.ahead:  # what is accumulated is corrected already
        return tf.ones([], tf.float64)
    return 1.0 - _power(momentum, _step(optimizer))


def look_ahead(optimizer: Any) -> LookAhead:
    """Return how a Nadam looks ahead in this step, as yet of no velocity.

    Args:
        optimizer: inner optimizer, built, a `Nadam`.
    """
    beta_1, step = float(optimizer.beta_1), _step(optimizer)
    now, then = (beta_1 * (1.0 - _entry(_LACKS, s)) for s in (step, step + 1.0))
    product = _power(beta_1, step) * _entry(_PRODUCTS, step)
    of_momentum = then / (1.0 - product * then)
    # Quotients have a share of 1 - beta_1 already.
    of_quotient = (1.0 - now) / (1.0 - product) / (1.0 - beta_1)
    return LookAhead(None, beta_1, tf.stack([of_momentum, of_quotient]))


def without_velocity(inputs: StepInputs) -> StepInputs:
    """Return a step that has no momentum but what divisors have.

    Args:
        inputs: inputs of the step, with divisors.
    """
    worker_state = dataclasses.replace(inputs.worker_state, velocity=[])
    return inputs._replace(momentum=0.0, worker_state=worker_state)


def _entry(table: np.ndarray, step: tf.Tensor) -> tf.Tensor:
    """Return what a table has of a step; it stays at its end."""
    last = len(table) - 1
    return tf.gather(table, tf.cast(tf.minimum(step, float(last)), tf.int32))


def _power(base: float, exponent: tf.Tensor) -> tf.Tensor:
    return tf.pow(tf.constant(base, tf.float64), exponent)


def _step(optimizer: Any) -> tf.Tensor:
    return tf.cast(optimizer.iterations.value, tf.float64) + 1.0
