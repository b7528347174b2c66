"""Which updates of Keras's optimizers the native operations know.

Only what is one of Keras's own steps with nothing around it, on variables of float32:
then the result has the bits of Keras's own operations. All else is left to the
optimizer itself.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_rules
from tf_dgc._internals.keras_optimizers import uses_weight_decay
from tf_dgc.inner.settings import CLIPPING
from tf_dgc.steps.native_update import UpdateRule

# What any optimizer may do in a step beside its rule and the decay of weights.
_AROUND = (*CLIPPING, "use_ema", "loss_scale_factor", "gradient_accumulation_steps")


def find(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    name: str | None = None,
    weighed: bool = False,
) -> UpdateRule | None:
    """Return the update that the optimizer's `apply` is, or None if it is another one.

    Call it in every step: learning rate and bias correction are those of this step.

    Args:
        optimizer: inner optimizer, built.
        variables: variables of the model with a gradient in this step.
        name: name of the optimizer's rule, where it is known though `update_step` was
            replaced.
        weighed: whether sums have the learning rate in them (`rates.py`).
    """
    if weighed:
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
    factor = 1.0 if weighed else keras.ops.cast(rate, "float32")
    own = keras_rules.rule_numbers(optimizer, name, factor)
    return rule._replace(hyperparameters={name: pack(rate, decay, own)})


def pack(rate: Any, decay: Any, own: Sequence[Any]) -> tf.Tensor:
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
    dtypes = {"float32", "float64"} if rule.descends else {"float32"}
    everything = [*rule.variables, *(s for slots in rule.slots for s in slots)]
    return all(v.dtype in dtypes for v in everything)
