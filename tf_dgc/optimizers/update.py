"""The inner optimizer's update, from what a step comes to."""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_rules, tracing
from tf_dgc._internals.keras_optimizers import uses_weight_decay
from tf_dgc.multiworker import consensus
from tf_dgc.optimizers.conditions import cond_in_all_replicas
from tf_dgc.optimizers.inner_hyperparameters import CLIPPING
from tf_dgc.steps import native
from tf_dgc.steps.base import StepOutcome
from tf_dgc.steps.native import UpdateRule

# --- Which updates of Keras's optimizers the native operations know.
#
# Only what is one of Keras's own steps with nothing around it, on variables of float32:
# then the result has the bits of Keras's own operations. All else is left to the
# optimizer itself.

# What any optimizer may do in a step beside its rule and the decay of weights.
_AROUND = (*CLIPPING, "use_ema", "loss_scale_factor", "gradient_accumulation_steps")


def find_native_rule(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    name: str | None = None,
    includes_learning_rate: bool = False,
) -> UpdateRule | None:
    """Return the update that the optimizer's `apply` is, or None if it is another one.

    Call it in every step: learning rate and bias correction are those of this step.

    Args:
        optimizer: inner optimizer, built.
        variables: variables of the model with a gradient in this step.
        name: name of the optimizer's rule, where it is known though `update_step` was
            replaced.
        includes_learning_rate: whether sums have the learning rate in them
            (`inner_hyperparameters.py`).
    """
    if includes_learning_rate:
        name = keras_rules.sgd_name(optimizer)
    name = name or keras_rules.rule_name(optimizer)
    if name is None or not _is_alone(optimizer, name, variables):
        return None
    decay = optimizer.weight_decay or 0.0
    decays = [bool(decay) and uses_weight_decay(optimizer, v.value) for v in variables]
    slots = [keras_rules.rule_slots(optimizer, name, v) for v in variables]
    rule = UpdateRule([name] * len(variables), {}, variables, slots, decays)
    if not _has_dtypes(rule):
        return None
    rate = optimizer.learning_rate
    factor = 1.0 if includes_learning_rate else keras.ops.cast(rate, "float32")
    own = keras_rules.rule_numbers(optimizer, name, factor)
    return rule._replace(hyperparameters={name: pack_hyperparameters(rate, decay, own)})


def pack_hyperparameters(rate: Any, decay: Any, own: Sequence[Any]) -> tf.Tensor:
    """Return the numbers of a rule as one tensor, float64 `[6]`.

    Args:
        rate: learning rate.
        decay: decay of weights.
        own: the rule's own numbers, four at most.
    """
    given = [rate, decay, *own, *[0.0] * (4 - len(own))]
    return tf.stack([tf.cast(n, tf.float64) for n in given])


def _is_alone(optimizer: Any, name: str, variables: Sequence[keras.Variable]) -> bool:
    settings = keras_rules.rule_settings(optimizer, name)
    return (
        not any(getattr(optimizer, setting) for setting in _AROUND)
        and len(set(map(id, variables))) == len(variables)
        and all(map(_is_number, [optimizer.weight_decay or 0.0, *settings]))
        and all(v.constraint is None for v in variables)
    )


def _is_number(setting: Any) -> bool:
    return isinstance(setting, numbers.Real) and not isinstance(setting, bool)


def _has_dtypes(rule: UpdateRule) -> bool:
    dtypes = {"float32", "float64"} if rule.is_plain_sgd else {"float32"}
    everything = [*rule.variables, *(s for slots in rule.slots for s in slots)]
    return all(v.dtype in dtypes for v in everything)


def all_workers_have_native_rules(
    strategy: tf.distribute.Strategy, variables: Sequence
) -> bool:
    """Return whether all workers have the native operations for these variables.

    Where TensorFlow optimizes Keras's operations it may round otherwise, so that an
    update is native on all workers or on none. Call it on all workers.
    """
    here = str(native.rules_available(variables))
    notes = consensus.exchange_texts(strategy, here, "compare their native operations")
    return set(notes.values()) == {str(True)}


def apply_update(
    optimizer: keras.optimizers.Optimizer,
    outcome: StepOutcome,
    variables: Sequence[keras.Variable],
    use_native: bool,
    name: str | None = None,
    includes_learning_rate: bool = False,
) -> tf.Tensor:
    """Let the inner optimizer apply the sums.

    Where the native operations know all that it does, they do it in one pass; in plain
    descent only what was sent is touched, with the same result as by Keras.

    Args:
        optimizer: inner optimizer, without what was taken over.
        outcome: outcome of the step.
        variables: variables of the model, in the order of the step's tensors.
        use_native: whether every worker has the operations (`have_operations`).
        name: name of the optimizer's rule, where it is known though `update_step` was
            replaced.
        includes_learning_rate: whether sums have the learning rate in them
            (`inner_hyperparameters.py`).

    Returns:
        The number of workers whose gradient was not finite, scalar int32.
    """
    known = use_native, name, includes_learning_rate
    if outcome.all_or_none:
        return _update_if_finite(optimizer, outcome, variables, known)
    rule = find_native_rule(optimizer, variables, name, includes_learning_rate)
    apply = _find_apply(outcome, rule, use_native) if rule else None
    if rule and apply:
        nonfinite = apply(rule)
        optimizer.iterations.assign_add(1)
        return nonfinite
    decoded, nonfinite = outcome.decode()
    sums = [
        tf.cast(tf.reshape(s, v.shape), v.dtype)
        for s, v in zip(decoded, variables, strict=True)
    ]
    # Not `apply`: a trainer calls this, and a subclass may have its own.
    optimizer.apply_gradients(list(zip(sums, variables, strict=True)))
    return nonfinite


def _update_if_finite(
    optimizer: keras.optimizers.Optimizer,
    outcome: StepOutcome,
    variables: Sequence[keras.Variable],
    known: tuple[bool, str | None, bool],
) -> tf.Tensor:
    """Do what `update` does, or nothing, iterations included."""
    sums, nonfinite = outcome.decode()

    def by_sums(*sums: tf.Tensor) -> None:
        decoded = StepOutcome(lambda: (sums, tf.constant(0)), 0, 0)
        apply_update(optimizer, decoded, variables, *known)

    cond_in_all_replicas(tf.equal(nonfinite, 0), by_sums, tuple(sums))
    return nonfinite


def _find_apply(
    outcome: StepOutcome, rule: UpdateRule, use_native: bool
) -> Callable[[UpdateRule], tf.Tensor] | None:
    """Return what updates without Keras; None if nothing does."""
    if outcome.apply and (use_native or rule.is_plain_sgd):
        return outcome.apply
    if use_native and rule.is_float32 and not tracing.in_xla_context():
        return functools.partial(native.apply_decoded, outcome.decode)
    return None
