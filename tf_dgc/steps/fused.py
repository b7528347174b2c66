"""The fused step of `TopK` with error feedback: one pass over memory, one request.

By the native operations where they can be used (`native.py`), else by TensorFlow's
(`operations.py`), which hand over the same words.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.choice import Choice, add_up, choose
from tf_dgc.codecs import dense, header
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives.packs import num_bytes
from tf_dgc.collectives.requests import Both, Either, Form
from tf_dgc.compressors import TopK, tie_offsets
from tf_dgc.metrics.staleness import LastSent
from tf_dgc.schedules import asking
from tf_dgc.steps import inside, native, native_update, operations
from tf_dgc.steps import plan as plans
from tf_dgc.steps.accumulation import entries
from tf_dgc.steps.base import Inputs, Outcome, Step
from tf_dgc.steps.native_update import UpdateRule
from tf_dgc.steps.plan import LocalStep, Plan
from tf_dgc.steps.settling import arrived_positions, settle


def begin(inputs: Inputs) -> Step | None:
    """Return the step; None for other methods, and without a residual.

    XLA has it composed: whether to go dense, and how much is sent, may be decided only
    at run time.
    """
    if type(inputs.compressor) is not TopK or not inputs.memory.residual:
        return None
    if tracing.in_xla_context():
        native.warn_of_xla()
        return None
    return _step(inputs, inputs.compressor)


def goes_dense(
    compressor: TopK,
    tensors: Sequence[Tensor],
    iteration: tf.Tensor | None,
    num_workers: int,
) -> Choice:
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
        given = asking.smallest(given)
    if type(compressor) is not TopK or tracing.in_xla_context():
        return asking.current(given, iteration) <= 0
    chosen, *_ = plans.shares(tensors, num_workers)
    coded = _coded_as(compressor, [tensors[i] for i in chosen])
    return plans.plan(coded, asking.of_step(given, iteration), num_workers).dense


class _Part(NamedTuple):
    """Tensors of a step that travel together, and what this worker sends of them."""

    places: list[int]
    local: LocalStep
    vector: tf.Tensor
    words: tf.Tensor
    finite: tf.Tensor

    @property
    def plan(self) -> Plan:
        return self.local.plan

    @property
    def request(self) -> Either:
        plan = self.plan
        form = Form(plan.layout, plan.counts)
        return Either(
            plan.dense,
            self.vector,
            self.words,
            plan.dense_entries,
            form=form,
            most_bytes=plan.most_bytes,
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
    plan: Plan


Arrived: TypeAlias = Sequence[tuple[_Part | Share, Both]]


def _step(inputs: Inputs, compressor: TopK) -> Step:
    path = native if native.is_live(inputs.memory.residual) else operations
    sparsity = asking.of_step(compressor.sparsity, inputs.iteration)
    offsets = tie_offsets(inputs.sizes, inputs.seed, inputs.iteration)
    inputs = inputs._replace(tensors=_coded_as(compressor, inputs.tensors))
    finite = tf.constant(True)
    if len(inputs.machine) > 1:
        inputs, finite = yield from inside.reduce(inputs)
    shares = inputs.shares
    if len(shares) > 1:  # what is not finite in one leaves out all
        values = list(map(entries, inputs.gradients))
        scales = path.drop(values, inputs.scales, inputs.memory.residual)
        inputs = inputs._replace(scales=tf.unstack(scales))
    # correct, compress, mask, encode
    parts = [
        _compress(path, inputs.of(share), share, sparsity, offsets) for share in shares
    ]
    finite = tf.reduce_all([finite, *(part.finite for part in parts)])
    inputs.memory.warn_of(finite, inputs.iteration)
    parts[1:] = [_flagged(part, finite) for part in parts[1:]]
    if len(inputs.machine) > 1:  # what it compressed is finite in any case
        parts[0] = _flagged_either(parts[0], finite)
    replies = yield [part.request for part in parts]
    arrived = list(zip(parts, replies, strict=True))
    _settle(inputs, arrived)
    # decode, sum
    return Outcome(
        decode=lambda: decode(path, arrived),
        entries=add_up([part.plan.entries for part in parts]),
        sent_bytes=add_up([part.sent_bytes for part in parts]),
        apply=functools.partial(apply, arrived) if path is native else None,
    )


def _coded_as(compressor: TopK, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t._replace(value_dtype=compressor.value_dtype) for t in tensors]


def _flagged(part: _Part, finite: tf.Tensor) -> _Part:
    """Return the part with the flag of the whole step; one that is summed."""
    return part._replace(
        vector=dense.encode([part.vector[1:]], finite, part.vector.dtype)
    )


def _flagged_either(part: _Part, finite: tf.Tensor) -> _Part:
    """Return the same of one that is summed or gathered."""
    vector, words = choose(
        part.plan.dense,
        lambda: (_flagged(part, finite).vector, part.words),
        lambda: (part.vector, header.add_flag(part.words, finite)),
    )
    vector.set_shape(part.vector.shape)
    words.set_shape(part.words.shape)
    return part._replace(vector=vector, words=words)


def _compress(
    path: Any,
    inputs: Inputs,
    places: list[int],
    sparsity: float | asking.Scheduled,
    offsets: Sequence[tf.Tensor],
) -> _Part:
    machine = len(inputs.machine)
    sent = plans.plan(inputs.tensors, sparsity, inputs.num_workers, machine)
    local = _local_step(inputs, sent, offsets)
    # Where entries may be dropped, the velocity is cleared when that is known.
    masks = False if inputs.drops_entries else inputs.factor_masking
    packed = choose(
        masks,
        lambda: path.compress(local._replace(factor_masking=True)),
        lambda: path.compress(local._replace(factor_masking=False)),
    )
    return _Part(places, local, *packed)


def _local_step(inputs: Inputs, sent: Plan, offsets: Sequence[tf.Tensor]) -> LocalStep:
    return LocalStep(
        sent,
        inputs.gradients,
        inputs.scales,
        inputs.memory.velocity or None,
        inputs.memory.residual,
        [offsets[i] for i in inputs.indices],
        inputs.momentum,
        inputs.nesterov,
        inputs.factor_masking,
        inputs.divisors,
    )


def _settle(inputs: Inputs, arrived: Sequence[tuple[_Part, Both]]) -> None:
    """Mend what is kept by what was left out on the way; remember what was sent."""
    for part, reply in arrived:
        if reply.delivered is not None:
            settle(part.local, part.words, reply.delivered, reply.left)
    recorder = inputs.memory.last_sent
    if recorder is None:
        return
    recorder.count_step()
    for part, reply in arrived:
        _record(recorder, [inputs.indices[i] for i in part.places], part, reply)


def _record(recorder: LastSent, indices: list[int], part: _Part, reply: Both) -> None:
    choose(
        part.plan.dense,
        lambda: recorder.record_all(indices),
        lambda: recorder.record_positions(
            indices, arrived_positions(part.local, part.words, reply.delivered)
        ),
    )


def decode(path: Any, arrived: Arrived) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return what `Outcome.decode` does.

    Args:
        path: module that unpacks, `native` or `operations`.
        arrived: reply to what was asked for each share of the tensors.
    """
    sums: dict[int, tf.Tensor] = {}
    nonfinite = None
    for part, reply in arrived:
        total, buffers, *_ = _after(nonfinite, reply)
        found, nonfinite = path.unpack(part.plan, total, buffers)
        sums.update(zip(part.places, found, strict=True))
    return [sums[i] for i in sorted(sums)], nonfinite


def apply(arrived: Arrived, rule: UpdateRule) -> tf.Tensor:
    """Do what `Outcome.apply` does, natively.

    Args:
        arrived: reply to what was asked for each share of the tensors.
        rule: update of all of them.
    """
    nonfinite = None
    for part, reply in arrived:
        total, buffers, *_ = _after(nonfinite, reply)
        own = rule.of(part.places)
        nonfinite = native_update.apply(part.plan, total, buffers, own)
    return nonfinite


def _after(nonfinite: tf.Tensor | None, reply: Both) -> Both:
    """Return the reply, to be had only if that of the part before was not refused."""
    with tf.control_dependencies([] if nonfinite is None else [nonfinite]):
        return Both(tf.identity(reply.total), tf.identity(reply.buffers))
