"""The top-k step's arithmetic with TensorFlow operations.

`native.py` has the same functions with native operations, which produce the same bits.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_dgc import clipping
from tf_dgc.clipping import Scale
from tf_dgc.codecs import buffer, value_types
from tf_dgc.codecs.buffer import SelectedEntries
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors import top_k
from tf_dgc.conditions import smart_cond
from tf_dgc.steps.accumulation import accumulate, clear_positions
from tf_dgc.steps.base import LocalStep, StepPlan, assign_all

TensorList: TypeAlias = list[tf.Tensor]
EncodedState: TypeAlias = tuple[
    tf.Tensor, tf.Tensor, list[tf.Tensor | None], TensorList
]


def compress(step: LocalStep) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Correct, select, mask and encode; update velocity and residual.

    Returns the vector of a dense step, the int32 words of a sparse step (one of them
    empty), and whether this worker's gradient was finite.
    """
    velocity, residual, finite = accumulate(
        step.plan.layout,
        step.gradients,
        step.scales,
        step.velocity,
        step.residual,
        step.momentum,
        step.nesterov,
        step.divisors,
    )
    vector, words, velocity, residual = select_and_encode(
        step.plan, velocity, residual, finite, step.offsets, step.factor_masking
    )
    assign_all(step.velocity, velocity)
    assign_all(step.residual, residual)
    return vector, words, finite


def scales_or_nan(
    gradients: Sequence[tf.Tensor], scales: Sequence[Scale], variables: Sequence[Any]
) -> tf.Tensor:
    """Return `clipping.scales_or_nan`; `variables` is for `native.scales_or_nan`."""
    del variables
    return clipping.scales_or_nan(gradients, scales)


def decode_and_sum(
    plan: StepPlan, vector: tf.Tensor, buffers: tf.Tensor
) -> tuple[TensorList, tf.Tensor]:
    """Return each tensor's sum, `[n]`, and the number of gradients that are not finite.

    The reply is the summed vector of a dense step, or all workers' buffers.
    """
    decoded: tuple[TensorList, tf.Tensor] = smart_cond(
        plan.dense,
        lambda: buffer.decode_dense(vector, plan.layout),
        lambda: buffer.decode_sparse(buffers, plan.layout, plan.counts),
    )
    return decoded


def select_and_encode(
    plan: StepPlan,
    velocity: Sequence[tf.Tensor | None],
    residual: TensorList,
    finite: tf.Tensor,
    offsets: TensorList,
    factor_masking: bool = True,
) -> EncodedState:
    """Select the entries to send, remove them from the local state, and encode them.

    Returns vector and words as `compress`, and the new velocity and residual, `[n]`.
    """
    dtype = buffer.summed_dtype(plan.layout)

    def encode_dense() -> EncodedState:
        sent = [
            _round_to(value_types.bound(r, t.max_magnitude), dtype)
            for t, r in zip(plan.layout, residual, strict=True)
        ]
        vector = buffer.encode_dense(sent, finite, dtype)
        unsent = [r - s for r, s in zip(residual, sent, strict=True)]
        # Masking would erase the momentum of all entries.
        return vector, tf.zeros([0], tf.int32), list(velocity), unsent

    def encode_sparse() -> EncodedState:
        tensors = [
            _select(t, k, offset, v, r, factor_masking)
            for t, k, offset, v, r in zip(
                plan.layout, plan.counts, offsets, velocity, residual, strict=True
            )
        ]
        selections, velocities, residuals = map(list, zip(*tensors, strict=True))
        words = buffer.encode_sparse(plan.layout, plan.counts, selections, finite)
        return tf.zeros([0], dtype), words, velocities, residuals

    encoded: EncodedState = smart_cond(plan.dense, encode_dense, encode_sparse)
    return encoded


def _round_to(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Round values to a narrower dtype; the result keeps their own."""
    if dtype.size >= values.dtype.size:
        return values
    return tf.cast(value_types.round_to(values, dtype), values.dtype)


def _select(
    tensor: TensorSpec,
    k: int | tf.Tensor,
    offset: tf.Tensor,
    velocity: tf.Tensor | None,
    residual: tf.Tensor,
    factor_masking: bool,
) -> tuple[SelectedEntries, tf.Tensor | None, tf.Tensor]:
    """Return the entries to send, and the velocity and residual without them."""
    if tensor.uncompressed:
        sent = value_types.bound(residual, tensor.max_magnitude)
        words = value_types.encode_values(sent, tensor.value_type)
        if tensor.uncompressed_dtype:
            sent = _decode(words, tensor, tensor.size)
        return SelectedEntries(None, words), velocity, residual - sent
    positions, values = top_k(residual, k, offset)
    sent = value_types.bound(values, tensor.max_magnitude)
    words = value_types.encode_values(sent, tensor.value_type)
    if velocity is not None and factor_masking:
        masked = clear_positions(velocity, positions)
        velocity = tf.where(tf.equal(k, tensor.size), velocity, masked)
    if not value_types.is_exact(tensor.value_type, tensor.dtype):
        sent = _decode(words, tensor, k)
    residual = tf.tensor_scatter_nd_update(
        residual, positions[:, tf.newaxis], values - sent
    )
    return SelectedEntries(positions, words), velocity, residual


def _decode(words: tf.Tensor, tensor: TensorSpec, k: int | tf.Tensor) -> tf.Tensor:
    """Return the k values that a receiver decodes, `[k]`."""
    rows = value_types.decode_values(
        words[tf.newaxis], tensor.value_type, k, tensor.dtype
    )
    return rows[0]
