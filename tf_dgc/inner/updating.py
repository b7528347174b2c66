"""The inner optimizer's update, from what a step comes to."""

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.cluster import meeting
from tf_dgc.inner import native_rules
from tf_dgc.inner.conditions import call_if
from tf_dgc.steps import native_update
from tf_dgc.steps.base import Outcome
from tf_dgc.steps.native_update import UpdateRule


def have_operations(strategy: tf.distribute.Strategy, variables: Sequence) -> bool:
    """Return whether all workers have the native operations for these variables.

    Where TensorFlow optimizes Keras's operations it may round otherwise, so that an
    update is native on all workers or on none. Call it on all workers.
    """
    here = str(native_update.is_live(variables))
    notes = meeting.share_notes(strategy, here, "compare their native operations")
    return set(notes.values()) == {str(True)}


def update(
    optimizer: keras.optimizers.Optimizer,
    outcome: Outcome,
    variables: Sequence[keras.Variable],
    natively: bool,
    name: str | None = None,
    weighed: bool = False,
) -> tf.Tensor:
    """Let the inner optimizer apply the sums.

    Where the native operations know all that it does, they do it in one pass; in plain
    descent only what was sent is touched, with the same result as by Keras.

    Args:
        optimizer: inner optimizer, without what was taken over.
        outcome: outcome of the step.
        variables: variables of the model, in the order of the step's tensors.
        natively: whether every worker has the operations (`have_operations`).
        name: name of the optimizer's rule, where it is known though `update_step` was
            replaced.
        weighed: whether sums have the learning rate in them (`rates.py`).

    Returns:
        The number of workers whose gradient was not finite, scalar int32.
    """
    known = natively, name, weighed
    if outcome.all_or_none:
        return _update_if_finite(optimizer, outcome, variables, known)
    rule = native_rules.find(optimizer, variables, name, weighed)
    apply = _find_apply(outcome, rule, natively) if rule else None
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
    outcome: Outcome,
    variables: Sequence[keras.Variable],
    known: tuple[bool, str | None, bool],
) -> tf.Tensor:
    """Do what `update` does, or nothing, iterations included."""
    sums, nonfinite = outcome.decode()

    def by_sums(*sums: tf.Tensor) -> None:
        decoded = Outcome(lambda: (sums, tf.constant(0)), 0, 0)
        update(optimizer, decoded, variables, *known)

    call_if(tf.equal(nonfinite, 0), by_sums, tuple(sums))
    return nonfinite


def _find_apply(
    outcome: Outcome, rule: UpdateRule, natively: bool
) -> Callable[[UpdateRule], tf.Tensor] | None:
    """Return what updates without Keras; None if nothing does."""
    if outcome.apply and (natively or rule.descends):
        return outcome.apply
    if natively and rule.is_narrow and not tracing.in_xla_context():
        return functools.partial(native_update.apply_decoded, outcome.decode)
    return None
