"""What becomes of the local state where an exchange leaves out entries on its way.

A fused step takes what it sends out of the residual while it passes over memory. Here
what did not arrive is put back, and the velocity cleared where entries did: by as many
scattered writes as there are entries, not by another pass.
"""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.choice import choose
from tf_dgc.codecs import wire
from tf_dgc.collectives.requests import Form, Left
from tf_dgc.collectives.space import Space
from tf_dgc.steps.plan import LocalStep


def settle(
    step: LocalStep, words: tf.Tensor, delivered: tf.Tensor, left: Left | None = None
) -> None:
    """Update residual and velocity by what arrived; a dense step leaves out nothing.

    Args:
        step: step as it was compressed, but with the `factor_masking` that is wanted.
        words: buffer of this worker, int32 `[w]`.
        delivered: whether each of its entries arrived, bool, tensor after tensor.
        left: sums that stay with this worker; None if there are none.
    """

    def sparse() -> tf.Tensor:
        positions = wire.positions(words, step.plan.layout, step.plan.counts)
        values = wire.values(words, step.plan.layout, step.plan.counts)
        for i, arrived in _by_tensor(step, delivered):
            _settle_tensor(step, i, positions[i], values[i], arrived)
        if left is not None:
            _keep(step, left)
        return tf.constant(True)

    choose(step.plan.dense, lambda: tf.constant(True), sparse)


def _settle_tensor(
    step: LocalStep, i: int, positions: tf.Tensor, values: tf.Tensor, arrived: tf.Tensor
) -> None:
    back = tf.where(arrived, tf.zeros_like(values), values)
    if step.residual:
        _scatter(tf.raw_ops.ResourceScatterNdAdd, step.residual[i], positions, back)
    if step.velocity and step.factor_masking is not False:
        # With every entry sent, masking would erase the momentum of all of them.
        partial = tf.less(step.plan.counts[i], step.plan.layout[i].size)
        partial = tf.logical_and(partial, step.factor_masking)
        at = tf.boolean_mask(positions, tf.logical_and(arrived, partial))
        none = tf.zeros(tf.shape(at), values.dtype)
        _scatter(tf.raw_ops.ResourceScatterNdUpdate, step.velocity[i], at, none)


def _keep(step: LocalStep, left: Left) -> None:
    """Add sums to the residual that this worker formed for others."""
    if not step.residual:
        return
    space = Space(Form(step.plan.layout, step.plan.counts))
    compressed = [i for i, t in enumerate(step.plan.layout) if not t.exempt]
    begins = tf.searchsorted(left.places, tf.cast(space.bases, tf.int32))
    ends = tf.concat([begins[1:], [tf.size(left.places)]], axis=0)
    for at, i in enumerate(compressed):
        part = slice(begins[at], ends[at])
        positions = left.places[part] - tf.cast(space.bases[at], tf.int32)
        values = tf.cast(left.values[part], step.plan.layout[i].dtype)
        _scatter(tf.raw_ops.ResourceScatterNdAdd, step.residual[i], positions, values)


def arrived_positions(
    step: LocalStep, words: tf.Tensor, delivered: tf.Tensor | None
) -> list[tf.Tensor | None]:
    """Return the positions, int32 `[k]`, of each tensor that went out and arrived."""
    positions = wire.positions(words, step.plan.layout, step.plan.counts)
    if delivered is None:
        return positions
    for i, arrived in _by_tensor(step, delivered):
        positions[i] = tf.boolean_mask(positions[i], arrived)
    return positions


def _by_tensor(step: LocalStep, delivered: tf.Tensor) -> list[tuple[int, tf.Tensor]]:
    """Return the tensors that are compressed, and which of their entries arrived."""
    compressed = [i for i, t in enumerate(step.plan.layout) if not t.exempt]
    if not compressed:  # TensorFlow splits nothing into no parts
        return []
    counts = [step.plan.counts[i] for i in compressed]
    parts = tf.split(delivered, counts)
    return list(zip(compressed, parts, strict=True))


def _scatter(
    operation: Any, variable: keras.Variable, positions: tf.Tensor, values: tf.Tensor
) -> None:
    # Not `tf.unravel_index`, which refuses none.
    strides = [math.prod(variable.shape[i + 1 :]) for i in range(len(variable.shape))]
    indices = positions[:, tf.newaxis] // strides % tuple(variable.shape)
    operation(ref=variable.value.handle, indices=indices, updates=values)
