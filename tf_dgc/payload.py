"""Compress, mask and encode one step's tensors, and back.

The same functions serve a sparse step (entries chosen by magnitude), a dense step
(everything is sent) and a schedule that decides between the two at run time.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc import dense, values, wire
from tf_dgc.choice import Choice, add_up, choose
from tf_dgc.compressors import num_sent, top_k
from tf_dgc.compressors.topk import check_capacity, top_k_of
from tf_dgc.correction import mask
from tf_dgc.wire import Selection, TensorLayout

Tensors: TypeAlias = list[tf.Tensor]


class Plan(NamedTuple):
    """What a step sends, known to all workers before it.

    Attributes:
        layout: of every tensor of the step.
        counts: entries of each that a sparse step sends; ints, or scalar int32 tensors
            where the sparsity is scheduled.
        dense: whether everything is sent: a bool, or a scalar bool tensor.
        taken: where `counts` are room, for XLA: how many of them are sent, scalar int32
            tensors; the others are sent as 0 and stay where they are.
    """

    layout: Sequence[TensorLayout]
    counts: Sequence[int | tf.Tensor]
    dense: Choice
    taken: Sequence[int | tf.Tensor] | None = None

    @property
    def entries(self) -> int | tf.Tensor:
        """Entries that one worker sends in this step: an int, or a scalar int64."""
        whole = sum(t.size for t in self.layout)
        chosen = add_up(self.counts if self.taken is None else self.taken)
        if isinstance(self.dense, bool):
            return whole if self.dense else chosen
        return tf.where(self.dense, tf.cast(whole, tf.int64), tf.cast(chosen, tf.int64))

    @property
    def dense_entries(self) -> int:
        """Length of the vector of a dense step."""
        return dense.num_entries(self.layout)


def plan(
    layout: Sequence[TensorLayout], sparsity: float | tf.Tensor, num_workers: int
) -> Plan:
    """Decide what is sent.

    A step goes dense when nothing is left out, and when the sparse buffers of all
    workers would cost more than an all-reduce of everything: gathering sends a
    worker's buffer to N-1 others, a ring all-reduce sends each entry 2(N-1)/N times.

    Args:
        layout: of every tensor of the step.
        sparsity: in [0, 1), a float or a scalar float64 tensor.
        num_workers: N.
    """
    counts = [t.size if t.exempt else num_sent(t.size, sparsity) for t in layout]
    sparse_words = wire.sparse_words(layout, counts)
    dense_words = dense.num_words(layout)
    if isinstance(sparsity, tf.Tensor):
        # As floats: N buffers of a large model overflow int32.
        ratio = tf.cast(sparse_words, tf.float64) * num_workers / (2.0 * dense_words)
        return Plan(layout, counts, tf.logical_or(sparsity <= 0, ratio > 1))
    costly = sparse_words * num_workers > 2 * dense_words
    return Plan(layout, counts, sparsity <= 0 or costly)


def in_fixed_shapes(step: Plan, smallest: float) -> Plan:
    """Return a sparse step's plan whose shapes are known while tracing, for XLA.

    Args:
        step: the plan, with counts that are tensors.
        smallest: the least that the sparsity may be.

    Raises:
        ValueError: if values are sent in a way that does not allow for it.
    """
    for tensor in step.layout:
        if not tensor.exempt:
            check_capacity(tensor.value_dtype)
    room = [t.size if t.exempt else num_sent(t.size, smallest) for t in step.layout]
    return Plan(step.layout, room, False, taken=step.counts)


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
        step: the plan.
        velocity: float `[n]` of each tensor, or None without momentum correction.
        residual: float `[n]` of each tensor, with this step's gradient.
        finite: scalar bool, whether this worker's gradient was finite.
        offsets: where ties are broken from, scalar int32 of each tensor.
        factor_masking: clear the velocity where entries are sent.

    Returns:
        The vector of a dense step (empty if sparse), the words of a sparse step (empty
        if dense), and the new velocity and residual.
    """

    def whole() -> tuple:
        # With every entry sent, masking would erase the momentum of all of them.
        sent = [
            values.at_most(r, t.largest)
            for t, r in zip(step.layout, residual, strict=True)
        ]
        rest = [r - s for r, s in zip(residual, sent, strict=True)]
        vector = dense.encode(sent, finite)
        return vector, tf.zeros([0], tf.int32), list(velocity), rest

    def chosen() -> tuple:
        taken = step.taken or [None] * len(step.layout)
        parts = [
            _send(t, k, few, offset, v, r, factor_masking)
            for t, k, few, offset, v, r in zip(
                *(step.layout, step.counts, taken, offsets, velocity, residual),
                strict=True,
            )
        ]
        selections, velocities, residuals = map(list, zip(*parts, strict=True))
        empty = tf.zeros([0], dense.widest(step.layout))
        words = wire.encode(step.layout, step.counts, selections, finite)
        return empty, words, velocities, residuals

    return choose(step.dense, whole, chosen)


def unpack(
    step: Plan, vector: tf.Tensor, buffers: tf.Tensor
) -> tuple[Tensors, tf.Tensor]:
    """Decode what the exchange returned.

    Args:
        step: the plan that was packed with.
        vector: sum of the dense vectors; ignored if sparse.
        buffers: int32 `[num_workers, words]`; ignored if dense.

    Returns:
        The sum over workers of each tensor, `[n]`, and the number of workers whose
        gradient was not finite.
    """
    return choose(
        step.dense,
        lambda: dense.decode(vector, step.layout),
        lambda: wire.decode(buffers, step.layout, step.counts),
    )


def _send(
    tensor: TensorLayout,
    k: int | tf.Tensor,
    taken: int | tf.Tensor | None,
    offset: tf.Tensor,
    velocity: tf.Tensor | None,
    residual: tf.Tensor,
    factor_masking: bool,
) -> tuple[Selection, tf.Tensor | None, tf.Tensor]:
    """Return what is sent of one tensor, and its velocity and residual after."""
    if tensor.exempt:
        sent = values.at_most(residual, tensor.largest)
        words = values.encode(sent, tensor.dtype.name)
        return Selection(None, words), velocity, residual - sent
    positions, is_sent = _choose(residual, k, taken, offset)
    found = tf.gather(residual, positions)
    wanted = found if is_sent is True else tf.where(is_sent, found, 0)
    sent = values.at_most(wanted, tensor.largest)
    words = values.encode(sent, tensor.value_dtype)
    if velocity is not None and factor_masking:
        whole = tf.equal(k if taken is None else taken, tensor.size)
        masked = mask(velocity, positions, is_sent)
        velocity = tf.where(whole, velocity, masked)
    if not values.is_exact(tensor.value_dtype, tensor.dtype):
        rows = values.decode(words[tf.newaxis], tensor.value_dtype, k, tensor.dtype)
        sent = rows[0]
    rest = found - sent
    residual = tf.tensor_scatter_nd_update(residual, positions[:, tf.newaxis], rest)
    return Selection(positions, words), velocity, residual


def _choose(
    residual: tf.Tensor,
    k: int | tf.Tensor,
    taken: int | tf.Tensor | None,
    offset: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor | bool]:
    """Return positions, int32 `[k]`, and which of them are sent."""
    if taken is None:
        return top_k(residual, k, offset)[0], True
    return top_k_of(residual, k, taken, offset)
