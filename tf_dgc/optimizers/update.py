"""Applies the inner optimizer's update to a step's sums.

If the update is one of Keras's own rules on float32 variables, the native operations
compute it in one pass, with the same bits as Keras. Otherwise the Keras optimizer
applies it.
"""

import itertools
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_rules, tracing
from tf_dgc._internals.keras_optimizers import uses_weight_decay
from tf_dgc.conditions import cond_in_all_replicas
from tf_dgc.multiworker import consensus
from tf_dgc.optimizers.inner_hyperparameters import CLIPPING
from tf_dgc.steps import native
from tf_dgc.steps.base import StepOutcome, UpdateRule

# Settings that add something to an optimizer's rule and weight decay.
_MODIFIERS = (*CLIPPING, "use_ema", "loss_scale_factor", "gradient_accumulation_steps")


def apply_update(
    optimizer: keras.optimizers.Optimizer,
    outcome: StepOutcome,
    variables: Sequence[keras.Variable],
    use_native: bool,
    rule_name: str | None = None,
    includes_learning_rate: bool = False,
) -> tf.Tensor:
    """Apply the update to the variables.

    Plain gradient descent touches the sent entries only, with the same result.

    Args:
        optimizer: inner optimizer, without the hyperparameters of the wrapper.
        outcome: outcome of the step.
        variables: the model's variables, in the order of the step's tensors.
        use_native: whether all workers have the native operations
            (`all_workers_have_native_rules`).
        rule_name: name of the optimizer's rule, if its `update_step` was replaced.
        includes_learning_rate: whether the sums include the learning rate
            (`apply_without_learning_rate`).

    Returns:
        Number of workers whose gradients were not finite, scalar int32.
    """
    if outcome.all_or_none:
        sums, nonfinite = outcome.decode()

        def apply_sums(*sums: tf.Tensor) -> None:
            apply_update(
                optimizer,
                StepOutcome(lambda: (sums, tf.constant(0)), 0, 0),
                variables,
                use_native,
                rule_name,
                includes_learning_rate,
            )

        cond_in_all_replicas(tf.equal(nonfinite, 0), apply_sums, tuple(sums))
        return nonfinite
    rule = find_native_rule(optimizer, variables, rule_name, includes_learning_rate)
    if rule and outcome.apply and (use_native or rule.is_plain_sgd):
        nonfinite = outcome.apply(rule)
    elif rule and use_native and rule.is_float32 and not tracing.in_xla_context():
        nonfinite = native.apply_decoded(outcome.decode, rule)
    else:
        return _apply_with_keras(optimizer, outcome, variables)
    optimizer.iterations.assign_add(1)
    return nonfinite


def _apply_with_keras(
    optimizer: keras.optimizers.Optimizer,
    outcome: StepOutcome,
    variables: Sequence[keras.Variable],
) -> tf.Tensor:
    sums, nonfinite = outcome.decode()
    pairs = [
        (tf.cast(tf.reshape(total, v.shape), v.dtype), v)
        for total, v in zip(sums, variables, strict=True)
    ]
    # Not `apply`: trainers call `apply_gradients`, which a subclass may override.
    optimizer.apply_gradients(pairs)
    return nonfinite


def find_native_rule(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    rule_name: str | None = None,
    includes_learning_rate: bool = False,
) -> UpdateRule | None:
    """Return the native rule that equals the optimizer's `apply`, if there is one.

    Call it in every step, with the variables that have a gradient: it contains the
    step's learning rate and bias correction. See `apply_update` for the arguments.
    """
    if includes_learning_rate:
        rule_name = keras_rules.sgd_name(optimizer)
    rule_name = rule_name or keras_rules.rule_name(optimizer)
    if rule_name is None or not _is_plain(optimizer, rule_name, variables):
        return None
    decay = optimizer.weight_decay or 0.0
    decays = [bool(decay) and uses_weight_decay(optimizer, v.value) for v in variables]
    slots = [keras_rules.rule_slots(optimizer, rule_name, v) for v in variables]
    rule = UpdateRule([rule_name] * len(variables), {}, variables, slots, decays)
    dtypes = {"float32", "float64"} if rule.is_plain_sgd else {"float32"}
    if any(v.dtype not in dtypes for v in itertools.chain(variables, *slots)):
        return None
    rate = optimizer.learning_rate
    factor = 1.0 if includes_learning_rate else keras.ops.cast(rate, "float32")
    rule_numbers = keras_rules.rule_numbers(optimizer, rule_name, factor)
    packed = pack_hyperparameters(rate, decay, rule_numbers)
    return rule._replace(hyperparameters={rule_name: packed})


def pack_hyperparameters(
    rate: float | tf.Tensor, decay: float | tf.Tensor, rule_numbers: Sequence[Any]
) -> tf.Tensor:
    """Return a rule's numbers as one tensor, float64 `[6]`.

    Args:
        rate: learning rate.
        decay: weight decay.
        rule_numbers: the rule's own numbers, at most four.
    """
    padding = [0.0] * (4 - len(rule_numbers))
    numbers_of_rule = [rate, decay, *rule_numbers, *padding]
    return tf.stack([tf.cast(number, tf.float64) for number in numbers_of_rule])


def _is_plain(
    optimizer: keras.optimizers.Optimizer,
    rule_name: str,
    variables: Sequence[keras.Variable],
) -> bool:
    """Whether a step consists of the rule and weight decay, with plain numbers."""
    settings = keras_rules.rule_settings(optimizer, rule_name)
    return (
        not any(getattr(optimizer, name) for name in _MODIFIERS)
        and len(set(map(id, variables))) == len(variables)
        and all(map(_is_number, [optimizer.weight_decay or 0.0, *settings]))
        and all(v.constraint is None for v in variables)
    )


def _is_number(setting: Any) -> bool:
    return isinstance(setting, numbers.Real) and not isinstance(setting, bool)


def all_workers_have_native_rules(
    strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]
) -> bool:
    """Return whether all workers have the native operations; call it on all workers.

    TensorFlow's optimizations of Keras's operations may round differently, so an update
    is native on all workers or on none.
    """
    here = str(native.rules_available(variables))
    replies = consensus.exchange_texts(
        strategy, here, "compare their native operations"
    )
    return set(replies.values()) == {str(True)}
