"""The fused step of `TopK` with error feedback: one pass over memory, one request.

By the native operations where they can be used (`native.py`), else by TensorFlow's
(`tensorflow_ops.py`), which hand over the same words.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc._internals import tracing
from tf_dgc.codecs import buffer
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.packing import num_bytes
from tf_dgc.collectives.requests import (
    BufferLayout,
    DenseOrSparse,
    DenseOrSparseReply,
    Remainder,
)
from tf_dgc.collectives.sparse_merge import FlatIndexSpace
from tf_dgc.compressors import TopK, tie_offsets
from tf_dgc.metrics import LastSent
from tf_dgc.smart_cond import BoolOrTensor, add_counts, smart_cond
from tf_dgc.steps import intra_node, native, tensorflow_ops
from tf_dgc.steps import plan as plans
from tf_dgc.steps.accumulation import gradient_values
from tf_dgc.steps.base import Step, StepInputs, StepOutcome
from tf_dgc.steps.native import UpdateRule
from tf_dgc.steps.plan import LocalStep, StepPlan

# --- What becomes of the local state where an exchange leaves out entries on its way.
#
# A fused step takes what it sends out of the residual while it passes over memory. Here
# what did not arrive is put back, and the velocity cleared where entries did: by as
# many
# scattered writes as there are entries, not by another pass.


def restore_dropped_entries(
    step: LocalStep,
    words: tf.Tensor,
    delivered: tf.Tensor,
    left: Remainder | None = None,
) -> None:
    """Update residual and velocity by what arrived; a dense step leaves out nothing.

    Args:
        step: step as it was compressed, but with the `factor_masking` that is wanted.
        words: buffer of this worker, int32 `[w]`.
        delivered: whether each of its entries arrived, bool, tensor after tensor.
        left: sums that stay with this worker; None if there are none.
    """

    def sparse() -> tf.Tensor:
        positions = buffer.sent_positions(words, step.plan.layout, step.plan.counts)
        values = buffer.sent_values(words, step.plan.layout, step.plan.counts)
        for i, arrived in _by_tensor(step, delivered):
            _settle_tensor(step, i, positions[i], values[i], arrived)
        if left is not None:
            _keep(step, left)
        return tf.constant(True)

    smart_cond(step.plan.dense, lambda: tf.constant(True), sparse)


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


def _keep(step: LocalStep, left: Remainder) -> None:
    """Add sums to the residual that this worker formed for others."""
    if not step.residual:
        return
    space = FlatIndexSpace(BufferLayout(step.plan.layout, step.plan.counts))
    compressed = [i for i, t in enumerate(step.plan.layout) if not t.uncompressed]
    begins = tf.searchsorted(left.positions, tf.cast(space.bases, tf.int32))
    ends = tf.concat([begins[1:], [tf.size(left.positions)]], axis=0)
    for at, i in enumerate(compressed):
        part = slice(begins[at], ends[at])
        positions = left.positions[part] - tf.cast(space.bases[at], tf.int32)
        values = tf.cast(left.values[part], step.plan.layout[i].dtype)
        _scatter(tf.raw_ops.ResourceScatterNdAdd, step.residual[i], positions, values)


def arrived_positions(
    step: LocalStep, words: tf.Tensor, delivered: tf.Tensor | None
) -> list[tf.Tensor | None]:
    """Return the positions, int32 `[k]`, of each tensor that went out and arrived."""
    positions = buffer.sent_positions(words, step.plan.layout, step.plan.counts)
    if delivered is None:
        return positions
    for i, arrived in _by_tensor(step, delivered):
        positions[i] = tf.boolean_mask(positions[i], arrived)
    return positions


def _by_tensor(step: LocalStep, delivered: tf.Tensor) -> list[tuple[int, tf.Tensor]]:
    """Return the tensors that are compressed, and which of their entries arrived."""
    compressed = [i for i, t in enumerate(step.plan.layout) if not t.uncompressed]
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


def start_top_k_step(inputs: StepInputs) -> Step | None:
    """Return the step; None for other methods, and without a residual.

    XLA has it composed: whether to go dense, and how much is sent, may be decided only
    at run time.
    """
    if type(inputs.compressor) is not TopK or not inputs.worker_state.residual:
        return None
    if tracing.in_xla_context():
        native.warn_of_xla()
        return None
    return _step(inputs, inputs.compressor)


def goes_dense(
    compressor: TopK,
    tensors: Sequence[TensorSpec],
    iteration: tf.Tensor | None,
    num_workers: int,
) -> BoolOrTensor:
    """Return whether a step leaves out nothing, as it is planned.

    Args:
        compressor: method of the tensors that are not exempt.
        tensors: descriptions of all tensors of the step.
        iteration: number of the step, a scalar integer tensor; None to ask of a
            schedule whether any step may.
        num_workers: number of workers, N, each on a machine of its own.
    """
    given = compressor.sparsity
    if iteration is None:
        given = schedules.smallest_sparsity(given)
    if type(compressor) is not TopK or tracing.in_xla_context():
        return schedules.sparsity_at(given, iteration) <= 0
    chosen, *_ = plans.split_uncompressed(tensors, num_workers)
    coded = _coded_as(compressor, [tensors[i] for i in chosen])
    return plans.plan_step(
        coded, schedules.sparsity_of_step(given, iteration), num_workers
    ).dense


class _Part(NamedTuple):
    """Tensors of a step that travel together, and what this worker sends of them."""

    places: list[int]
    local: LocalStep
    vector: tf.Tensor
    words: tf.Tensor
    finite: tf.Tensor

    @property
    def plan(self) -> StepPlan:
        return self.local.plan

    @property
    def request(self) -> DenseOrSparse:
        plan = self.plan
        form = BufferLayout(plan.layout, plan.counts)
        return DenseOrSparse(
            plan.dense,
            self.vector,
            self.words,
            plan.dense_entries,
            layout=form,
            max_bytes=plan.most_bytes,
        )

    @property
    def sent_bytes(self) -> int | tf.Tensor:
        return num_bytes(self.vector) + num_bytes(self.words)


class Share(NamedTuple):
    """Tensors of a step that travel together, to who has sent none of them.

    Attributes:
        places: places of the tensors among those of the step.
        plan: plan of what is sent of them.
    """

    places: list[int]
    plan: StepPlan


ShareReplies: TypeAlias = Sequence[tuple[_Part | Share, DenseOrSparseReply]]


def _step(inputs: StepInputs, compressor: TopK) -> Step:
    path = (
        native if native.is_available(inputs.worker_state.residual) else tensorflow_ops
    )
    sparsity = schedules.sparsity_of_step(compressor.sparsity, inputs.iteration)
    offsets = tie_offsets(inputs.sizes, inputs.seed, inputs.iteration)
    inputs = inputs._replace(tensors=_coded_as(compressor, inputs.tensors))
    finite = tf.constant(True)
    if len(inputs.machine) > 1:
        inputs, finite = yield from intra_node.reduce_within_node(inputs)
    shares = inputs.shares
    if len(shares) > 1:  # what is not finite in one leaves out all
        values = list(map(gradient_values, inputs.gradients))
        scales = path.zero_scales_if_nonfinite(
            values, inputs.scales, inputs.worker_state.residual
        )
        inputs = inputs._replace(scales=tf.unstack(scales))
    # correct, compress, mask, encode
    parts = [
        _compress(path, inputs.of(share), share, sparsity, offsets) for share in shares
    ]
    finite = tf.reduce_all([finite, *(part.finite for part in parts)])
    inputs.worker_state.warn_of(finite, inputs.iteration)
    parts[1:] = [_flagged(part, finite) for part in parts[1:]]
    if len(inputs.machine) > 1:  # what it compressed is finite in any case
        parts[0] = _flagged_either(parts[0], finite)
    replies = yield [part.request for part in parts]
    arrived = list(zip(parts, replies, strict=True))
    _settle(inputs, arrived)
    # decode, sum
    return StepOutcome(
        decode=lambda: decode_shares(path, arrived),
        entries=add_counts([part.plan.entries for part in parts]),
        sent_bytes=add_counts([part.sent_bytes for part in parts]),
        apply=functools.partial(apply_shares, arrived) if path is native else None,
    )


def _coded_as(compressor: TopK, tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [t._replace(value_dtype=compressor.value_dtype) for t in tensors]


def _flagged(part: _Part, finite: tf.Tensor) -> _Part:
    """Return the part with the flag of the whole step; one that is summed."""
    return part._replace(
        vector=buffer.encode_dense([part.vector[1:]], finite, part.vector.dtype)
    )


def _flagged_either(part: _Part, finite: tf.Tensor) -> _Part:
    """Return the same of one that is summed or gathered."""
    vector, words = smart_cond(
        part.plan.dense,
        lambda: (_flagged(part, finite).vector, part.words),
        lambda: (part.vector, buffer.add_nonfinite_flag(part.words, finite)),
    )
    vector.set_shape(part.vector.shape)
    words.set_shape(part.words.shape)
    return part._replace(vector=vector, words=words)


def _compress(
    path: Any,
    inputs: StepInputs,
    places: list[int],
    sparsity: float | schedules.ScheduledSparsity,
    offsets: Sequence[tf.Tensor],
) -> _Part:
    machine = len(inputs.machine)
    sent = plans.plan_step(inputs.tensors, sparsity, inputs.num_workers, machine)
    local = _local_step(inputs, sent, offsets)
    # Where entries may be dropped, the velocity is cleared when that is known.
    masks = False if inputs.drops_entries else inputs.factor_masking
    packed = smart_cond(
        masks,
        lambda: path.compress(local._replace(factor_masking=True)),
        lambda: path.compress(local._replace(factor_masking=False)),
    )
    return _Part(places, local, *packed)


def _local_step(
    inputs: StepInputs, sent: StepPlan, offsets: Sequence[tf.Tensor]
) -> LocalStep:
    return LocalStep(
        sent,
        inputs.gradients,
        inputs.scales,
        inputs.worker_state.velocity or None,
        inputs.worker_state.residual,
        [offsets[i] for i in inputs.indices],
        inputs.momentum,
        inputs.nesterov,
        inputs.factor_masking,
        inputs.divisors,
    )


def _settle(
    inputs: StepInputs, arrived: Sequence[tuple[_Part, DenseOrSparseReply]]
) -> None:
    """Mend what is kept by what was left out on the way; remember what was sent."""
    for part, reply in arrived:
        if reply.delivered is not None:
            restore_dropped_entries(
                part.local, part.words, reply.delivered, reply.remainder
            )
    recorder = inputs.worker_state.last_sent
    if recorder is None:
        return
    recorder.count_step()
    for part, reply in arrived:
        _record(recorder, [inputs.indices[i] for i in part.places], part, reply)


def _record(
    recorder: LastSent, indices: list[int], part: _Part, reply: DenseOrSparseReply
) -> None:
    smart_cond(
        part.plan.dense,
        lambda: recorder.record_all(indices),
        lambda: recorder.record_positions(
            indices, arrived_positions(part.local, part.words, reply.delivered)
        ),
    )


def decode_shares(
    path: Any, arrived: ShareReplies
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return what `Outcome.decode` does.

    Args:
        path: module that unpacks, `native` or `operations`.
        arrived: reply to what was asked for each share of the tensors.
    """
    sums: dict[int, tf.Tensor] = {}
    nonfinite = None
    for part, reply in arrived:
        total, buffers, *_ = _after(nonfinite, reply)
        found, nonfinite = path.decode_and_sum(part.plan, total, buffers)
        sums.update(zip(part.places, found, strict=True))
    return [sums[i] for i in sorted(sums)], nonfinite


def apply_shares(arrived: ShareReplies, rule: UpdateRule) -> tf.Tensor:
    """Do what `Outcome.apply` does, natively.

    Args:
        arrived: reply to what was asked for each share of the tensors.
        rule: update of all of them.
    """
    nonfinite = None
    for part, reply in arrived:
        total, buffers, *_ = _after(nonfinite, reply)
        own = rule.of(part.places)
        nonfinite = native.decode_and_apply(part.plan, total, buffers, own)
    return nonfinite


def _after(
    nonfinite: tf.Tensor | None, reply: DenseOrSparseReply
) -> DenseOrSparseReply:
    """Return the reply, to be had only if that of the part before was not refused."""
    with tf.control_dependencies([] if nonfinite is None else [nonfinite]):
        return DenseOrSparseReply(tf.identity(reply.total), tf.identity(reply.buffers))
