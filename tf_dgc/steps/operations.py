"""The fused step by TensorFlow operations: what is handed over, and back.

The native operations (`native.py`) do the same in one pass over memory; a test holds
both to the same results. The same functions serve a sparse step (entries chosen by
magnitude), a dense step (everything is sent) and a schedule that decides between the
two at run time.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_dgc.choice import choose
from tf_dgc.codecs import dense, value_types, wire
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.codecs.wire import Selection
from tf_dgc.compressors import top_k
from tf_dgc.steps.accumulation import accumulate
from tf_dgc.steps.memory import store
from tf_dgc.steps.plan import LocalStep, Plan
from tf_dgc.transforms import clipping
from tf_dgc.transforms.clipping import Scale
from tf_dgc.transforms.correction import mask

Tensors: TypeAlias = list[tf.Tensor]


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
    vector, words, velocity, residual = pack(
        step.plan, velocity, residual, finite, step.offsets, step.factor_masking
    )
    store(step.velocity, velocity)
    store(step.residual, residual)
    return vector, words, finite


def drop(
    gradients: Sequence[tf.Tensor], scales: Sequence[Scale], variables: Any
) -> tf.Tensor:
    """Do what `clipping.drop` does, wherever the variables are."""
    del variables
    return clipping.drop(gradients, scales)


def pack(
    step: Plan,
    velocity: Sequence[tf.Tensor | None],
    residual: Tensors,
    finite: tf.Tensor,
    offsets: Tensors,
    factor_masking: bool = True,
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor | None], Tensors]:
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
        dtype = dense.summed_dtype(step.layout)
        sent = [
            rounded(value_types.at_most(r, t.largest), dtype)
            for t, r in zip(step.layout, residual, strict=True)
        ]
        rest = [r - s for r, s in zip(residual, sent, strict=True)]
        vector = dense.encode(sent, finite, dtype)
        return vector, tf.zeros([0], tf.int32), list(velocity), rest

    def chosen() -> tuple:
        parts = [
            _send(t, k, offset, v, r, factor_masking)
            for t, k, offset, v, r in zip(
                step.layout, step.counts, offsets, velocity, residual, strict=True
            )
        ]
        selections, velocities, residuals = map(list, zip(*parts, strict=True))
        empty = tf.zeros([0], dense.summed_dtype(step.layout))
        words = wire.encode(step.layout, step.counts, selections, finite)
        return empty, words, velocities, residuals

    return choose(step.dense, whole, chosen)


def unpack(
    step: Plan, vector: tf.Tensor, buffers: tf.Tensor
) -> tuple[Tensors, tf.Tensor]:
    """Decode what the exchange returned.

    Args:
        step: plan that was packed with.
        vector: sum of the dense vectors; ignored if sparse.
        buffers: buffers of all workers, int32 `[num_workers, words]`; ignored if dense.

    Returns:
        The sum over workers of each tensor, `[n]`, and the number of workers whose
        gradient was not finite.
    """
    return choose(
        step.dense,
        lambda: dense.decode(vector, step.layout),
        lambda: wire.decode(buffers, step.layout, step.counts),
    )


def rounded(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return what is left of values that are sent as `dtype`, in their own."""
    if dtype.size >= values.dtype.size:
        return values
    return tf.cast(value_types.narrow(values, dtype), values.dtype)


def decoded(words: tf.Tensor, tensor: Tensor, k: int | tf.Tensor) -> tf.Tensor:
    """Return what a receiver sees of k values, coded as the tensor's are."""
    rows = value_types.decode(words[tf.newaxis], tensor.value_type, k, tensor.dtype)
    return rows[0]


def _send(
    tensor: Tensor,
    k: int | tf.Tensor,
    offset: tf.Tensor,
    velocity: tf.Tensor | None,
    residual: tf.Tensor,
    factor_masking: bool,
) -> tuple[Selection, tf.Tensor | None, tf.Tensor]:
    """Return what is sent of one tensor, and its velocity and residual after."""
    if tensor.exempt:
        sent = value_types.at_most(residual, tensor.largest)
        words = value_types.encode(sent, tensor.value_type)
        sent = decoded(words, tensor, tensor.size) if tensor.exempt_dtype else sent
        return Selection(None, words), velocity, residual - sent
    positions, found = top_k(residual, k, offset)
    sent = value_types.at_most(found, tensor.largest)
    words = value_types.encode(sent, tensor.value_type)
    if velocity is not None and factor_masking:
        masked = mask(velocity, positions)
        velocity = tf.where(tf.equal(k, tensor.size), velocity, masked)
    if not value_types.is_exact(tensor.value_type, tensor.dtype):
        sent = decoded(words, tensor, k)
    rest = found - sent
    residual = tf.tensor_scatter_nd_update(residual, positions[:, tf.newaxis], rest)
    return Selection(positions, words), velocity, residual
