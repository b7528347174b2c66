"""The variants of Adam that `AdamCorrection` supports, and their formulas."""

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import keras_rules
from tf_dgc.conditions import BoolOrTensor
from tf_dgc.steps import preconditioning
from tf_dgc.steps.base import StepInputs
from tf_dgc.steps.preconditioning import LookAhead


class AdamVariant(NamedTuple):
    """How a variant differs from Adam.

    Attributes:
        rule: name of its rule in `keras_rules`.
        amsgrad: whether it divides by the root of the largest second moment so far.
        infinity_norm: whether it divides by a decaying largest magnitude (Adamax).
        nesterov: whether it looks ahead of its momentum (Nadam).
    """

    rule: str
    amsgrad: bool = False
    infinity_norm: bool = False
    nesterov: bool = False

    @property
    def native_rule(self) -> str | None:
        """Name of the rule if the native operations have it."""
        return None if self.infinity_norm or self.nesterov else self.rule


_VARIANTS = {
    variant.rule: variant
    for variant in (
        AdamVariant("adam"),
        AdamVariant("adam_amsgrad", amsgrad=True),
        AdamVariant("adamax", infinity_norm=True),
        AdamVariant("nadam", nesterov=True),
    )
}
# Nadam's momentum in step t is beta_1 * (1 - 0.5 * 0.96**t). Keras keeps the product of
# these in a variable that it does not save, so it is computed from the step here.
_NADAM_DECREASE = 0.5 * 0.96 ** np.arange(1001.0)
_NADAM_DECREASE[0] = 0.0
_NADAM_PRODUCTS = np.cumprod(1.0 - _NADAM_DECREASE)


def find_adam_variant(optimizer: keras.optimizers.Optimizer) -> AdamVariant | None:
    """Return the variant whose whole step an optimizer takes; None for others."""
    rule = keras_rules.adam_name(optimizer)
    return None if rule is None else _VARIANTS[rule]


def step_divisor_numbers(
    variant: AdamVariant,
    optimizer: keras.optimizers.Optimizer,
    momentum: float,
    factors: tf.Tensor,
    active: BoolOrTensor,
) -> tf.Tensor:
    """Return the numbers of this step's divisors, float64 `[tensors, 5]`.

    See `preconditioning.divisor_numbers`; `momentum` is that of the velocity.
    """
    beta_2, epsilon = float(optimizer.beta_2), optimizer.epsilon
    step = _step(optimizer)
    if variant.infinity_norm:
        return preconditioning.infinity_divisor_numbers(
            factors, momentum, beta_2, epsilon, active
        )
    if variant.nesterov:  # Nadam adds epsilon after the bias correction
        epsilon = epsilon * tf.sqrt(1.0 - _power(beta_2, step))
    return preconditioning.divisor_numbers(
        factors, step, momentum, beta_2, epsilon, active
    )


def bias_correction(
    variant: AdamVariant, optimizer: keras.optimizers.Optimizer, momentum: float
) -> tf.Tensor:
    """Return the number that the summed update is divided by, scalar float64."""
    if variant.nesterov:  # `look_ahead` has corrected it already
        return tf.ones([], tf.float64)
    return 1.0 - _power(momentum, _step(optimizer))


def look_ahead(optimizer: keras.optimizers.Optimizer) -> LookAhead:
    """Return a built `Nadam`'s look-ahead in this step, without a velocity."""
    beta_1, step = float(optimizer.beta_1), _step(optimizer)
    momentum = beta_1 * (1.0 - _lookup(_NADAM_DECREASE, step))
    next_momentum = beta_1 * (1.0 - _lookup(_NADAM_DECREASE, step + 1.0))
    product = _power(beta_1, step) * _lookup(_NADAM_PRODUCTS, step)
    velocity_weight = next_momentum / (1.0 - product * next_momentum)
    # A preconditioned gradient already includes the factor 1 - beta_1.
    gradient_weight = (1.0 - momentum) / (1.0 - product) / (1.0 - beta_1)
    return LookAhead(None, beta_1, tf.stack([velocity_weight, gradient_weight]))


def without_velocity(inputs: StepInputs) -> StepInputs:
    """Return the inputs of a step whose only momentum is that of its divisors."""
    worker_state = dataclasses.replace(inputs.worker_state, velocity=[])
    return inputs._replace(momentum=0.0, worker_state=worker_state)


def _lookup(table: np.ndarray[Any, Any], step: tf.Tensor) -> tf.Tensor:
    """Return the table's entry of a step; the last one for later steps."""
    last = len(table) - 1
    return tf.gather(table, tf.cast(tf.minimum(step, float(last)), tf.int32))


def _power(base: float, exponent: tf.Tensor) -> tf.Tensor:
    return tf.pow(tf.constant(base, tf.float64), exponent)


def _step(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    return tf.cast(optimizer.iterations.value, tf.float64) + 1.0
