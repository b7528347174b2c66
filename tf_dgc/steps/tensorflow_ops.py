"""The fused step by TensorFlow operations: what is handed over, and back.

The native operations (`native.py`) do the same in one pass over memory; a test holds
both to the same results. The same functions serve a sparse step (entries chosen by
magnitude), a dense step (everything is sent) and a schedule that decides between the
two at run time.
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
from tf_dgc.smart_cond import smart_cond
from tf_dgc.steps.accumulation import accumulate, clear_positions
from tf_dgc.steps.plan import LocalStep, StepPlan
from tf_dgc.steps.state import assign_all

TensorList: TypeAlias = list[tf.Tensor]


def compress(step: LocalStep) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Correct, compress, mask and encode; update velocity and residual.

    Returns:
        The vector of a dense step (empty if sparse), the int32 words of a sparse step
        (empty if dense), and a scalar bool: whether this worker's gradient was finite.
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


def zero_scales_if_nonfinite(
    gradients: Sequence[tf.Tensor], scales: Sequence[Scale], variables: Any
) -> tf.Tensor:
    """Do what `clipping.drop` does, wherever the variables are."""
    del variables
    return clipping.scales_or_nan(gradients, scales)


def select_and_encode(
    step: StepPlan,
    velocity: Sequence[tf.Tensor | None],
    residual: TensorList,
    finite: tf.Tensor,
    offsets: TensorList,
    factor_masking: bool = True,
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor | None], TensorList]:
    """Choose what is sent, take it out of the local state, and encode it.

    Args:
        step: plan of what is sent.
        velocity: velocity of each tensor, float `[n]`, or None without momentum
            correction.
        residual: residual of each tensor, float `[n]`, with this step's gradient.
        finite: scalar bool, whether this worker's gradient was finite.
        offsets: position of each tensor where ties are broken from, scalar int32.
        factor_masking: whether to clear the velocity where entries are sent.

    Returns:
        The vector of a dense step (empty if sparse), the words of a sparse step (empty
        if dense), and the new velocity and residual.
    """

    def whole() -> tuple:
        # With every entry sent, masking would erase the momentum of all of them.
        dtype = buffer.summed_dtype(step.layout)
        sent = [
            round_to_summed(value_types.bound(r, t.largest), dtype)
            for t, r in zip(step.layout, residual, strict=True)
        ]
        rest = [r - s for r, s in zip(residual, sent, strict=True)]
        vector = buffer.encode_dense(sent, finite, dtype)
        return vector, tf.zeros([0], tf.int32), list(velocity), rest

    def chosen() -> tuple:
        parts = [
            _send(t, k, offset, v, r, factor_masking)
            for t, k, offset, v, r in zip(
                step.layout, step.counts, offsets, velocity, residual, strict=True
            )
        ]
        selections, velocities, residuals = map(list, zip(*parts, strict=True))
        empty = tf.zeros([0], buffer.summed_dtype(step.layout))
        words = buffer.encode_sparse(step.layout, step.counts, selections, finite)
        return empty, words, velocities, residuals

    return smart_cond(step.dense, whole, chosen)


def decode_and_sum(
    step: StepPlan, vector: tf.Tensor, buffers: tf.Tensor
) -> tuple[TensorList, tf.Tensor]:
    """Decode what the exchange returned.

    Args:
        step: plan that was packed with.
        vector: sum of the dense vectors; ignored if sparse.
        buffers: buffers of all workers, int32 `[num_workers, words]`; ignored if dense.

    Returns:
        The sum over workers of each tensor, `[n]`, and the number of workers whose
        gradient was not finite.
    """
    return smart_cond(
        step.dense,
        lambda: buffer.decode_dense(vector, step.layout),
        lambda: buffer.decode_sparse(buffers, step.layout, step.counts),
    )


def round_to_summed(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return what is left of values that are sent as `dtype`, in their own."""
    if dtype.size >= values.dtype.size:
        return values
    return tf.cast(value_types.round_to(values, dtype), values.dtype)


def decoded_values(
    words: tf.Tensor, tensor: TensorSpec, k: int | tf.Tensor
) -> tf.Tensor:
    """Return what a receiver sees of k values, coded as the tensor's are."""
    rows = value_types.decode_values(
        words[tf.newaxis], tensor.value_type, k, tensor.dtype
    )
    return rows[0]


def _send(
    tensor: TensorSpec,
    k: int | tf.Tensor,
    offset: tf.Tensor,
    velocity: tf.Tensor | None,
    residual: tf.Tensor,
    factor_masking: bool,
) -> tuple[SelectedEntries, tf.Tensor | None, tf.Tensor]:
    """Return what is sent of one tensor, and its velocity and residual after."""
    if tensor.uncompressed:
        sent = value_types.bound(residual, tensor.largest)
        words = value_types.encode_values(sent, tensor.value_type)
        sent = (
            decoded_values(words, tensor, tensor.size)
            if tensor.uncompressed_dtype
            else sent
        )
        return SelectedEntries(None, words), velocity, residual - sent
    positions, found = top_k(residual, k, offset)
    sent = value_types.bound(found, tensor.largest)
    words = value_types.encode_values(sent, tensor.value_type)
    if velocity is not None and factor_masking:
        masked = clear_positions(velocity, positions)
        velocity = tf.where(tf.equal(k, tensor.size), velocity, masked)
    if not value_types.is_exact(tensor.value_type, tensor.dtype):
        sent = decoded_values(words, tensor, k)
    rest = found - sent
    residual = tf.tensor_scatter_nd_update(residual, positions[:, tf.newaxis], rest)
    return SelectedEntries(positions, words), velocity, residual
