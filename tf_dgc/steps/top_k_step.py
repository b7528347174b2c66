"""The step of `TopK` with error feedback: one pass over memory, one collective.

1. Sum the gradients of a machine's workers, if the algorithm asks for that.
2. Split the tensors into parts, each with a collective of its own: usually one part.
3. Plan how many entries of each tensor are sent, or that the part is dense.
4. Correct with momentum, accumulate, select, mask, encode.
5. Exchange: gather the buffers, or sum the vectors of a dense part.
6. Return entries to the residual that the algorithm dropped on the way.
7. Decode and sum, or update the variables directly.

`native.py` does 4 and 7 with native operations, `tensorflow_ops.py` with TensorFlow's;
both produce the same words.
"""

import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc import clipping, schedules
from tf_dgc._internals import tracing
from tf_dgc.codecs import buffer
from tf_dgc.codecs.bits import num_bytes
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import (
    AllToAll,
    BufferLayout,
    DenseOrSparse,
    DenseOrSparseReply,
    Remainder,
    Reply,
    Request,
)
from tf_dgc.collectives.sparse_merge import FlatIndexSpace
from tf_dgc.compressors import TopK, tie_offsets
from tf_dgc.compressors.topk import is_top_k
from tf_dgc.conditions import BoolOrTensor, add_counts, smart_cond
from tf_dgc.steps import native, tensorflow_ops
from tf_dgc.steps.accumulation import gradient_values, scaled_dense_gradients
from tf_dgc.steps.base import (
    LocalStep,
    Step,
    StepInputs,
    StepOutcome,
    StepPlan,
    UpdateRule,
    plan_step,
    split_uncompressed,
)
from tf_dgc.steps.staleness import LastSent


def start_top_k_step(inputs: StepInputs) -> Step | None:
    """Return the step; None for other methods, without a residual, and within XLA.

    XLA cannot compile a decision at run time: how many entries are sent, and whether
    the step is dense.
    """
    if not is_top_k(inputs.compressor) or not inputs.worker_state.residual:
        return None
    if tracing.in_xla_context():
        native.warn_of_xla()
        return None
    return _step(inputs, inputs.compressor)


def _step(inputs: StepInputs, compressor: TopK) -> Step:
    residual = inputs.worker_state.residual
    path = native if native.is_available(residual) else tensorflow_ops
    sparsity = schedules.sparsity_of_step(compressor.sparsity, inputs.iteration)
    tie_breaks = tie_offsets(inputs.sizes, inputs.seed, inputs.iteration)
    inputs = inputs._replace(tensors=_with_value_dtype(compressor, inputs.tensors))
    finite = tf.constant(True)
    reduces = len(inputs.machine) > 1
    if reduces:
        inputs, finite = yield from _reduce_within_node(inputs)
    shares = inputs.shares
    if len(shares) > 1:  # a gradient that is not finite in one part zeroes all
        values = [gradient_values(gradient) for gradient in inputs.gradients]
        scales = path.scales_or_nan(values, inputs.scales, residual)
        inputs = inputs._replace(scales=tf.unstack(scales))
    parts = [
        _compress(path.compress, inputs.of(places), places, sparsity, tie_breaks)
        for places in shares
    ]
    finite = tf.reduce_all([finite, *(part.finite for part in parts)])
    inputs.worker_state.warn_if_nonfinite(finite, inputs.iteration)
    parts[1:] = [_flag_dense(part, finite) for part in parts[1:]]
    if reduces:  # the reduced gradients are finite in any case
        parts[0] = _flag(parts[0], finite)
    replies: Sequence[Any] = yield [part.request for part in parts]
    for part, reply in zip(parts, replies, strict=True):
        if reply.delivered is not None:
            restore_dropped_entries(
                part.local, part.words, reply.delivered, reply.remainder
            )
    _record_sent(inputs, parts, replies)
    received = [
        ReceivedPart(part.places, part.local.plan, reply)
        for part, reply in zip(parts, replies, strict=True)
    ]
    return StepOutcome(
        decode=lambda: decode_parts(path.decode_and_sum, received),
        entries=add_counts([part.local.plan.entries for part in parts]),
        sent_bytes=add_counts(
            [num_bytes(part.vector) + num_bytes(part.words) for part in parts]
        ),
        apply=functools.partial(apply_parts, received) if path is native else None,
    )


def is_dense(
    compressor: TopK,
    tensors: Sequence[TensorSpec],
    iteration: tf.Tensor | None,
    num_workers: int,
) -> BoolOrTensor:
    """Return whether a step sends all entries of the compressed tensors.

    `iteration` None asks whether any step of a schedule is dense. Each worker is on a
    machine of its own.
    """
    sparsity = compressor.sparsity
    if iteration is None:
        sparsity = schedules.smallest_sparsity(sparsity)
    if not is_top_k(compressor) or tracing.in_xla_context():
        return schedules.sparsity_at(sparsity, iteration) <= 0
    places = split_uncompressed(tensors, num_workers)[0]
    layout = _with_value_dtype(compressor, [tensors[i] for i in places])
    planned = schedules.sparsity_of_step(sparsity, iteration)
    return plan_step(layout, planned, num_workers).dense


def _with_value_dtype(
    compressor: TopK, tensors: Sequence[TensorSpec]
) -> list[TensorSpec]:
    return [t._replace(value_dtype=compressor.value_dtype) for t in tensors]


# --- One part of a step ---------------------------------------------------------------


class _SentPart(NamedTuple):
    """Tensors of one collective, and what this worker sends of them."""

    places: list[int]
    local: LocalStep
    vector: tf.Tensor
    words: tf.Tensor
    finite: tf.Tensor

    @property
    def request(self) -> DenseOrSparse:
        plan = self.local.plan
        return DenseOrSparse(
            plan.dense,
            self.vector,
            self.words,
            plan.dense_entries,
            layout=BufferLayout(plan.layout, plan.counts),
            max_bytes=plan.most_bytes,
        )


class ReceivedPart(NamedTuple):
    """Tensors of one collective, and its reply."""

    places: list[int]  # indices of the tensors among those of the step
    plan: StepPlan
    reply: DenseOrSparseReply


def _compress(
    compress: Callable[[LocalStep], tuple[tf.Tensor, tf.Tensor, tf.Tensor]],
    inputs: StepInputs,
    places: list[int],
    sparsity: float | schedules.ScheduledSparsity,
    tie_breaks: Sequence[tf.Tensor],
) -> _SentPart:
    plan = plan_step(inputs.tensors, sparsity, inputs.num_workers, len(inputs.machine))
    local = LocalStep(
        plan=plan,
        gradients=inputs.gradients,
        scales=inputs.scales,
        velocity=inputs.worker_state.velocity or None,
        residual=inputs.worker_state.residual,
        offsets=[tie_breaks[i] for i in inputs.indices],
        momentum=inputs.momentum,
        nesterov=inputs.nesterov,
        factor_masking=inputs.factor_masking,
        divisors=inputs.divisors,
    )
    # If entries may be dropped, `restore_dropped_entries` masks the delivered ones.
    masks = False if inputs.drops_entries else inputs.factor_masking
    vector, words, finite = smart_cond(
        masks,
        lambda: compress(local._replace(factor_masking=True)),
        lambda: compress(local._replace(factor_masking=False)),
    )
    return _SentPart(places, local, vector, words, finite)


def _flag_dense(part: _SentPart, finite: tf.Tensor) -> _SentPart:
    vector = buffer.encode_dense([part.vector[1:]], finite, part.vector.dtype)
    return part._replace(vector=vector)


def _flag(part: _SentPart, finite: tf.Tensor) -> _SentPart:
    """Return a part, dense or not, with the flag of the whole step."""
    vector, words = smart_cond(
        part.local.plan.dense,
        lambda: (_flag_dense(part, finite).vector, part.words),
        lambda: (part.vector, buffer.add_nonfinite_flag(part.words, finite)),
    )
    vector.set_shape(part.vector.shape)
    words.set_shape(part.words.shape)
    return part._replace(vector=vector, words=words)


# --- Intra-node reduce ----------------------------------------------------------------
#
# The workers of a machine sum their gradients before compression. Each worker owns a
# shard of every compressed tensor. It continues with the machine's sum in its shard and
# zeros elsewhere. So accumulators have their usual shape, and the sum over all workers
# is unchanged.


def _reduce_within_node(
    inputs: StepInputs,
) -> Generator[list[Request], list[Reply], tuple[StepInputs, tf.Tensor]]:
    """Return inputs with the machine's sums, and whether this gradient was finite.

    A worker whose gradient is not finite contributes zeros.
    """
    tensors, machine = inputs.tensors, inputs.machine
    gradients, finite = scaled_dense_gradients(tensors, inputs.gradients, inputs.scales)
    if not all(isinstance(s, float) for s in inputs.scales):  # products may overflow
        gradients, fits = clipping.multiply_or_zero(gradients, [1.0] * len(gradients))
        finite = tf.logical_and(finite, fits)
    by_dtype: dict[tf.DType, list[int]] = {}
    for i, t in enumerate(tensors):
        if not t.uncompressed:
            by_dtype.setdefault(t.dtype, []).append(i)
    if by_dtype:
        replies = yield [
            AllToAll(_shard_rows([gradients[i] for i in places], len(machine)), machine)
            for places in by_dtype.values()
        ]
        rank = machine.index(int(tf.get_static_value(inputs.worker)))
        for places, rows in zip(by_dtype.values(), replies, strict=True):
            widths = [-(-tensors[i].size // len(machine)) for i in places]
            shards = tf.split(tf.reduce_sum(rows, axis=0), widths)
            for i, shard in zip(places, shards, strict=True):
                gradients[i] = _pad_shard(shard, rank, tensors[i].size)
    scales = [1.0] * len(gradients)
    return inputs._replace(gradients=gradients, scales=scales), finite


def _shard_rows(gradients: Sequence[tf.Tensor], num_workers: int) -> tf.Tensor:
    """Return a row for each worker: its shards of all tensors, concatenated."""
    padded = [tf.pad(g, [[0, -g.shape[0] % num_workers]]) for g in gradients]
    return tf.concat([tf.reshape(g, [num_workers, -1]) for g in padded], axis=1)


def _pad_shard(shard: tf.Tensor, rank: int, size: int) -> tf.Tensor:
    """Return a gradient `[size]` that is zero outside the shard of this rank."""
    begin = min(rank * shard.shape[0], size)
    shard = shard[: size - begin]  # the last shards may be padded
    return tf.pad(shard, [[begin, size - begin - shard.shape[0]]])


# --- Decoding and updating ------------------------------------------------------------


def decode_parts(
    decode_and_sum: Callable[..., tuple[list[tf.Tensor], tf.Tensor]],
    received: Sequence[ReceivedPart],
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the result of `StepOutcome.decode`, by `native` or `tensorflow_ops`."""
    sums: dict[int, tf.Tensor] = {}
    nonfinite = None
    for part in received:
        total, buffers = _after(nonfinite, part.reply)
        part_sums, nonfinite = decode_and_sum(part.plan, total, buffers)
        sums.update(zip(part.places, part_sums, strict=True))
    return [sums[i] for i in sorted(sums)], nonfinite


def apply_parts(received: Sequence[ReceivedPart], rule: UpdateRule) -> tf.Tensor:
    """Update the variables natively, see `StepOutcome.apply`."""
    nonfinite = None
    for part in received:
        total, buffers = _after(nonfinite, part.reply)
        part_rule = rule.of(part.places)
        nonfinite = native.decode_and_apply(part.plan, total, buffers, part_rule)
    return nonfinite


def _after(
    previous: tf.Tensor | None, reply: DenseOrSparseReply
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a reply's tensors, which fail if the previous part was malformed."""
    with tf.control_dependencies([] if previous is None else [previous]):
        return tf.identity(reply.total), tf.identity(reply.buffers)


# --- Entries that the algorithm dropped -----------------------------------------------
#
# Compressing has already removed all selected entries from the residual. Here the
# dropped ones are written back, by one scattered write per entry, not another pass.


def restore_dropped_entries(
    step: LocalStep,
    words: tf.Tensor,
    delivered: tf.Tensor,
    remainder: Remainder | None = None,
) -> None:
    """Return dropped entries to the residual, and mask the velocity of delivered ones.

    A dense step drops nothing. `delivered` is bool, tensor after tensor; `remainder`
    are sums of several workers that stay with this one.
    """

    def restore() -> tf.Tensor:
        positions = buffer.sent_positions(words, step.plan.layout, step.plan.counts)
        values = buffer.sent_values(words, step.plan.layout, step.plan.counts)
        for i, arrived in _per_tensor(step, delivered):
            _restore_tensor(step, i, positions[i], values[i], arrived)
        if remainder is not None:
            _add_remainder(step, remainder)
        return tf.constant(True)

    smart_cond(step.plan.dense, lambda: tf.constant(True), restore)


def _restore_tensor(
    step: LocalStep, i: int, positions: tf.Tensor, values: tf.Tensor, arrived: tf.Tensor
) -> None:
    dropped = tf.where(arrived, tf.zeros_like(values), values)
    if step.residual:
        _scatter_add(step.residual[i], positions, dropped)
    if step.velocity and step.factor_masking is not False:
        # If all entries are sent, masking would erase the momentum of all of them.
        partial = tf.less(step.plan.counts[i], step.plan.layout[i].size)
        masks = tf.logical_and(partial, step.factor_masking)
        masked = tf.boolean_mask(positions, tf.logical_and(arrived, masks))
        _scatter_zeros(step.velocity[i], masked)


def _add_remainder(step: LocalStep, remainder: Remainder) -> None:
    if not step.residual:
        return
    space = FlatIndexSpace(BufferLayout(step.plan.layout, step.plan.counts))
    compressed = [i for i, t in enumerate(step.plan.layout) if not t.uncompressed]
    begins = tf.searchsorted(remainder.positions, tf.cast(space.bases, tf.int32))
    ends = tf.concat([begins[1:], [tf.size(remainder.positions)]], axis=0)
    for n, i in enumerate(compressed):
        part = slice(begins[n], ends[n])
        positions = remainder.positions[part] - tf.cast(space.bases[n], tf.int32)
        values = tf.cast(remainder.values[part], step.plan.layout[i].dtype)
        _scatter_add(step.residual[i], positions, values)


def _per_tensor(step: LocalStep, delivered: tf.Tensor) -> list[tuple[int, tf.Tensor]]:
    """Return the index of each compressed tensor, and which entries were delivered."""
    compressed = [i for i, t in enumerate(step.plan.layout) if not t.uncompressed]
    if not compressed:  # `tf.split` rejects an empty list of sizes
        return []
    counts = [step.plan.counts[i] for i in compressed]
    return list(zip(compressed, tf.split(delivered, counts), strict=True))


def _scatter_add(
    variable: keras.Variable, positions: tf.Tensor, values: tf.Tensor
) -> None:
    indices = _unravel(variable, positions)
    tf.raw_ops.ResourceScatterNdAdd(
        ref=variable.value.handle, indices=indices, updates=values
    )


def _scatter_zeros(variable: keras.Variable, positions: tf.Tensor) -> None:
    zeros = tf.zeros(tf.shape(positions), variable.dtype)
    indices = _unravel(variable, positions)
    tf.raw_ops.ResourceScatterNdUpdate(
        ref=variable.value.handle, indices=indices, updates=zeros
    )


def _unravel(variable: keras.Variable, positions: tf.Tensor) -> tf.Tensor:
    # `tf.unravel_index` rejects an empty list of positions.
    strides = [math.prod(variable.shape[i + 1 :]) for i in range(len(variable.shape))]
    return positions[:, tf.newaxis] // strides % tuple(variable.shape)


# --- Staleness ------------------------------------------------------------------------


def _record_sent(
    inputs: StepInputs,
    parts: Sequence[_SentPart],
    replies: Sequence[DenseOrSparseReply],
) -> None:
    last_sent = inputs.worker_state.last_sent
    if last_sent is None:
        return
    last_sent.count_step()
    for part, reply in zip(parts, replies, strict=True):
        indices = [inputs.indices[i] for i in part.places]
        _record_part(last_sent, indices, part, reply.delivered)


def _record_part(
    last_sent: LastSent,
    indices: list[int],
    part: _SentPart,
    delivered: tf.Tensor | None,
) -> None:
    smart_cond(
        part.local.plan.dense,
        lambda: last_sent.record_all(indices),
        lambda: last_sent.record_positions(
            indices, delivered_positions(part.local, part.words, delivered)
        ),
    )


def delivered_positions(
    step: LocalStep, words: tf.Tensor, delivered: tf.Tensor | None
) -> list[tf.Tensor | None]:
    """Return the positions, int32 `[k]`, of each tensor's delivered entries."""
    positions = buffer.sent_positions(words, step.plan.layout, step.plan.counts)
    if delivered is None:
        return positions
    for i, arrived in _per_tensor(step, delivered):
        positions[i] = tf.boolean_mask(positions[i], arrived)
    return positions
