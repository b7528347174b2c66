"""A step composed of any method's exchanges, tensor by tensor."""

import inspect
from collections.abc import Generator, Sequence
from typing import TypeAlias

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.codecs import buffer, value_types
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import packing
from tf_dgc.collectives.packing import TensorExchange
from tf_dgc.collectives.requests import (
    Aggregation,
    Reply,
    Request,
    Result,
    SparseEntries,
    position_mask,
    to_dense_tensor,
)
from tf_dgc.compressors.base import Compressor
from tf_dgc.compressors.common.one_round import (
    send_coded,
    send_rounded,
    send_whole,
)
from tf_dgc.compressors.random_keys import RandomKeys, tie_break_key
from tf_dgc.smart_cond import add_counts, smart_cond
from tf_dgc.steps.accumulation import accumulate
from tf_dgc.steps.base import Step, StepInputs, StepOutcome
from tf_dgc.steps.flat_buffer import flat_views

StateTensors: TypeAlias = dict[str, tf.Tensor]


def start_generic_step(inputs: StepInputs) -> Step:
    """Return the step; every method has one."""
    return _step(inputs)


def _step(inputs: StepInputs) -> Step:
    tensors, worker_state = inputs.tensors, inputs.worker_state
    velocity, values, finite = accumulate(
        tensors,
        inputs.gradients,
        inputs.scales,
        worker_state.velocity or None,
        worker_state.residual or None,
        inputs.momentum,
        inputs.nesterov,
        inputs.divisors,
        inputs.compressor.feedback_decay,
    )
    worker_state.warn_of(finite, inputs.iteration)
    # Other sums are as wide as their terms, and are refused when they overflow.
    bounds = not inputs.compressor.respects_largest
    within = [
        value_types.bound(v, t.largest) if bounds and t.narrow else v
        for t, v in zip(tensors, values, strict=True)
    ]
    ties = tie_break_key(inputs.seed, inputs.iteration, len(inputs.sizes))
    seeds = inputs.seed, inputs.iteration
    keys_per_tensor = [
        RandomKeys(*seeds, i, inputs.worker, ties, t.largest, inputs.num_workers)
        for i, t in zip(inputs.indices, tensors, strict=True)
    ]
    states = worker_state.read(inputs.compressor.reads_residual)
    if inputs.compressor.reads_residual:
        # So that a method finds the gradient where values were bounded, too.
        for state, bounded, v in zip(states, within, values, strict=True):
            if bounded is not v:
                state["residual"] += tf.reshape(bounded - v, state["residual"].shape)
    common = worker_state.read_common()
    merged, common = yield from aggregate_tensors(
        inputs.compressor,
        tensors,
        within,
        states,
        common,
        keys_per_tensor,
        finite,
        inputs.sums_uncompressed,
    )
    worker_state.store_common(common)
    _keep(inputs, velocity, values, merged.results)
    sent = zip(tensors, merged.results, strict=True)
    return StepOutcome(
        decode=lambda: (
            [to_dense_tensor(r.sum) for r in merged.results],
            merged.nonfinite,
        ),
        entries=add_counts(
            [t.size if r.entries is None else r.entries for t, r in sent]
        ),
        sent_bytes=merged.sent_bytes,
    )


def aggregate_tensors(
    compressor: Compressor,
    tensors: Sequence[TensorSpec],
    values: Sequence[tf.Tensor],
    states: Sequence[StateTensors],
    common: StateTensors,
    keys_per_tensor: Sequence[RandomKeys],
    finite: tf.Tensor,
    separate_uncompressed: bool = False,
) -> Generator[list[Request], list[Reply], tuple[packing.PackedOutcome, StateTensors]]:
    """Run the exchanges of one worker's tensors.

    Args:
        compressor: method of all tensors that are not exempt.
        tensors: descriptions of those that have a gradient in this step.
        values: values that each may send, float `[n]`.
        states: state of the method by name, for each; empty if exempt.
        common: state of the method by name, of all at once.
        keys_per_tensor: seeds of this step, for each.
        finite: scalar bool, whether this worker's gradient was finite.
        separate_uncompressed: whether exempt tensors are summed, whatever the others
            are.

    Returns:
        What came of it, with a result for each tensor; and the new `common`.
    """
    exempt_by = "sum" if separate_uncompressed else compressor.aggregation
    seen = flat_views(tensors, compressor.together)
    parts = []
    for view in seen:
        shaped, state = view.values(values), {**view.state(states), **common}
        if view.seen.uncompressed:
            parts.append(_uncompressed_part(view.seen, shaped, exempt_by))
        else:
            parts.append(
                _part(compressor, view.seen, shaped, state, view.keys(keys_per_tensor))
            )
    merged = yield from packing.run_in_lockstep(parts, finite)
    results: dict[int, Result] = {}
    for view, result in zip(seen, merged.results, strict=True):
        results.update(zip(view.places, view.results(result, states), strict=True))
        changed = result.state or {}
        common = {name: changed.get(name, value) for name, value in common.items()}
    own = merged._replace(results=[results[i] for i in range(len(tensors))])
    return own, common


def _uncompressed_part(
    tensor: TensorSpec, values: tf.Tensor, aggregation: str
) -> TensorExchange:
    within = value_types.bound(values, tensor.largest)
    if tensor.uncompressed_dtype:
        stated, exchange = _coded(tensor, within, aggregation)
    else:
        stated = tensor.size * tensor.dtype.size
        exchange = send_whole(within, aggregation)
    return TensorExchange(
        tensor.label, tensor.signature, stated, exchange, tensor.narrow
    )


def _coded(
    tensor: TensorSpec, values: tf.Tensor, aggregation: str
) -> tuple[int, Aggregation]:
    """Return the bytes and the exchange of an exempt tensor that is coded."""
    if aggregation == "sum":
        return tf.bfloat16.size * tensor.size, send_rounded(values, tf.bfloat16)
    flat = tf.reshape(values, [-1])
    return 4 * buffer.uncompressed_words([tensor]), send_coded(flat, tensor.value_type)


def _part(
    compressor: Compressor,
    tensor: TensorSpec,
    values: tf.Tensor,
    state: dict[str, tf.Tensor],
    keys: RandomKeys,
) -> TensorExchange:
    """Begin a method's exchange."""
    begun = compressor.exchange(values, state, keys)
    _check_generator(compressor, begun)
    return TensorExchange(
        f"{compressor!r} on {tensor.label}",
        tensor.signature_of(compressor.name),
        compressor.bytes(tensor.shape, tensor.dtype),
        begun,
        tensor.narrow,
    )


def _check_generator(compressor: Compressor, begun: object) -> None:
    if not inspect.isgenerator(begun):
        raise ValueError(
            f"`{type(compressor).__name__}.exchange` must be a generator: it asks with "
            f"`yield Sum(...)` or `yield Gather(...)`. Received: {show(begun)}"
        )


def _keep(
    inputs: StepInputs,
    velocity: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    results: Sequence[Result],
) -> None:
    """Store what was not sent, velocity where nothing was sent, and the state."""
    worker_state = inputs.worker_state
    pairs = zip(values, results, strict=True)
    worker_state.store_residual([_left(v, r.sent) for v, r in pairs])
    if worker_state.last_sent:
        worker_state.last_sent.count_step()
        chosen = [_chosen(r) for r in results]
        worker_state.last_sent.record_chosen(inputs.indices, chosen)
    if worker_state.velocity:
        worker_state.store_velocity(
            [
                _mask(inputs, t, v, r)
                for t, v, r in zip(inputs.tensors, velocity, results, strict=True)
            ]
        )
    worker_state.store_states([r.state or {} for r in results])


def _left(values: tf.Tensor, sent: tf.Tensor | SparseEntries) -> tf.Tensor:
    """Return what was not sent, `[n]`: of `Entries` in the memory of the values."""
    if not isinstance(sent, SparseEntries):
        return values - tf.reshape(sent, [-1])
    at = sent.positions[:, tf.newaxis]
    return tf.tensor_scatter_nd_sub(values, at, sent.values)


def _mask(
    inputs: StepInputs, tensor: TensorSpec, velocity: tf.Tensor, result: Result
) -> tf.Tensor:
    """Clear the velocity where entries went out, unless all did."""
    compressor = inputs.compressor
    partial = compressor.kind == "sparsification" and result.entries is not None
    if not partial:
        return velocity
    return smart_cond(
        inputs.factor_masking,
        lambda: _cleared(compressor, tensor, velocity, result),
        lambda: velocity,
    )


def _cleared(
    compressor: Compressor, tensor: TensorSpec, velocity: tf.Tensor, result: Result
) -> tf.Tensor:
    sent = result.sent
    if result.chosen is None and isinstance(sent, SparseEntries):
        all_sent = tf.equal(result.entries, tensor.size)
        kept = tf.where(all_sent, tf.gather(velocity, sent.positions), 0)
        at = sent.positions[:, tf.newaxis]
        return tf.tensor_scatter_nd_update(velocity, at, kept)
    if result.chosen is None:
        raise ValueError(
            f"{compressor!r} sends some entries and not others, so its "
            "`Result` must say which: pass `chosen`, or `factor_masking=False` to "
            f"the optimizer. Received: entries={result.entries}, chosen=None"
        )
    masked = tf.where(_chosen(result), tf.zeros_like(velocity), velocity)
    return tf.where(tf.equal(result.entries, tensor.size), velocity, masked)


def _chosen(result: Result) -> tf.Tensor:
    """Return whether each entry went out, by value where the method does not say."""
    chosen, sent = result.chosen, result.sent
    if chosen is None and isinstance(sent, SparseEntries):
        return position_mask(sent)
    chosen = tf.not_equal(sent, 0) if chosen is None else chosen
    return tf.reshape(chosen, [-1])
