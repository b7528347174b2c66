"""The step of any method: runs `Compressor.aggregate` for each tensor, in lockstep."""

from collections.abc import Generator, Sequence
from typing import TypeAlias

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.codecs import buffer, value_types
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import packing
from tf_dgc.collectives.packing import TensorExchange
from tf_dgc.collectives.requests import (
    Reply,
    Request,
    Result,
    SparseEntries,
    position_mask,
    to_dense_tensor,
)
from tf_dgc.compressors.base import Compressor, Sparsifier
from tf_dgc.compressors.common.one_round import send_coded, send_rounded, send_whole
from tf_dgc.compressors.random_keys import RandomKeys, tie_break_key
from tf_dgc.conditions import add_counts, smart_cond
from tf_dgc.steps.accumulation import accumulate
from tf_dgc.steps.base import Step, StepInputs, StepOutcome
from tf_dgc.steps.flat_buffer import flat_views

StateTensors: TypeAlias = dict[str, tf.Tensor]


def start_generic_step(inputs: StepInputs) -> Step:
    """Return the step, which supports every method.

    1. Accumulate the gradients in velocity and residual.
    2. Exchange the tensors.
    3. Store the unsent values, the masked velocity, and the method's state.
    """
    compressor, tensors = inputs.compressor, inputs.tensors
    worker_state = inputs.worker_state
    velocity, values, finite = accumulate(
        tensors,
        inputs.gradients,
        inputs.scales,
        worker_state.velocity or None,
        worker_state.residual or None,
        inputs.momentum,
        inputs.nesterov,
        inputs.divisors,
        compressor.feedback_decay,
    )
    worker_state.warn_if_nonfinite(finite, inputs.iteration)
    bounded = values
    if not compressor.limits_magnitudes:
        # Only for sums that are cast to a narrower dtype; others are checked instead.
        bounded = [
            value_types.bound(v, t.max_magnitude) if t.narrow_dtype else v
            for t, v in zip(tensors, values, strict=True)
        ]
    states = worker_state.read(compressor.reads_residual)
    if compressor.reads_residual:
        # The method computes the gradient as `values - state["residual"]`.
        for state, b, v in zip(states, bounded, values, strict=True):
            if b is not v:
                state["residual"] += tf.reshape(b - v, state["residual"].shape)
    outcome, common = yield from aggregate_tensors(
        compressor,
        tensors,
        bounded,
        states,
        worker_state.read_common(),
        _random_keys(inputs),
        finite,
        inputs.sums_uncompressed,
    )
    worker_state.store_common(common)
    _store(inputs, velocity, values, outcome.results)
    return StepOutcome(
        decode=lambda: (
            [to_dense_tensor(r.sum) for r in outcome.results],
            outcome.nonfinite,
        ),
        entries=add_counts(
            [
                t.size if r.entries is None else r.entries
                for t, r in zip(tensors, outcome.results, strict=True)
            ]
        ),
        sent_bytes=outcome.sent_bytes,
    )


def _random_keys(inputs: StepInputs) -> list[RandomKeys]:
    tie_breaks = tie_break_key(inputs.seed, inputs.iteration, len(inputs.sizes))
    return [
        RandomKeys(
            inputs.seed,
            inputs.iteration,
            i,
            inputs.worker,
            tie_breaks,
            t.max_magnitude,
            inputs.num_workers,
        )
        for i, t in zip(inputs.indices, inputs.tensors, strict=True)
    ]


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
    """Exchange one worker's tensors; return the outcome and the new `common` state.

    Values are float `[n]`. With `separate_uncompressed`, uncompressed tensors are
    summed even if the method gathers.
    """
    aggregation = "sum" if separate_uncompressed else compressor.aggregation
    views = flat_views(tensors, compressor.entire_model)
    exchanges = []
    for view in views:
        tensor, tensor_values = view.seen, view.values(values)
        if tensor.uncompressed:
            exchange = _uncompressed_exchange(tensor, tensor_values, aggregation)
        else:
            state = {**view.state(states), **common}
            keys = view.keys(keys_per_tensor)
            exchange = _method_exchange(compressor, tensor, tensor_values, state, keys)
        exchanges.append(exchange)
    outcome = yield from packing.run_in_lockstep(exchanges, finite)
    results: dict[int, Result] = {}
    for view, result in zip(views, outcome.results, strict=True):
        results.update(zip(view.places, view.results(result, states), strict=True))
        new = result.state or {}
        common = {name: new.get(name, value) for name, value in common.items()}
    ordered = [results[i] for i in range(len(tensors))]
    return outcome._replace(results=ordered), common


def _uncompressed_exchange(
    tensor: TensorSpec, values: tf.Tensor, aggregation: str
) -> TensorExchange:
    bounded = value_types.bound(values, tensor.max_magnitude)
    if not tensor.uncompressed_dtype:
        num_bytes = tensor.size * tensor.dtype.size
        exchange = send_whole(bounded, aggregation)
    elif aggregation == "sum":
        num_bytes = tensor.size * tf.bfloat16.size
        exchange = send_rounded(bounded, tf.bfloat16)
    else:
        num_bytes = 4 * buffer.uncompressed_words([tensor])
        exchange = send_coded(tf.reshape(bounded, [-1]), tensor.value_type)
    return TensorExchange(
        tensor.label, tensor.signature, num_bytes, exchange, tensor.narrow_dtype
    )


def _method_exchange(
    compressor: Compressor,
    tensor: TensorSpec,
    values: tf.Tensor,
    state: StateTensors,
    keys: RandomKeys,
) -> TensorExchange:
    exchange = compressor.aggregate(values, state, keys)
    if not isinstance(exchange, Generator):
        raise ValueError(
            f"`{type(compressor).__name__}.aggregate` must be a generator that yields "
            f"`AllReduce(...)` or `AllGather(...)`. Received: {show(exchange)}"
        )
    return TensorExchange(
        f"{compressor!r} on {tensor.label}",
        tensor.signature_of(compressor.name),
        compressor.bytes(tensor.shape, tensor.dtype),
        exchange,
        tensor.narrow_dtype,
    )


def _store(
    inputs: StepInputs,
    velocity: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    results: Sequence[Result],
) -> None:
    worker_state = inputs.worker_state
    worker_state.store_residual(
        [_subtract_sent(v, r.sent) for v, r in zip(values, results, strict=True)]
    )
    if worker_state.last_sent:
        worker_state.last_sent.count_step()
        masks = [_sent_mask(r) for r in results]
        worker_state.last_sent.record_chosen(inputs.indices, masks)
    if worker_state.velocity:
        worker_state.store_velocity(
            [
                _mask_velocity(inputs, t, v, r)
                for t, v, r in zip(inputs.tensors, velocity, results, strict=True)
            ]
        )
    worker_state.store_states([r.state or {} for r in results])


def _subtract_sent(values: tf.Tensor, sent: tf.Tensor | SparseEntries) -> tf.Tensor:
    if isinstance(sent, SparseEntries):
        # In place: TensorFlow reuses the memory of `values`.
        indices = sent.positions[:, tf.newaxis]
        return tf.tensor_scatter_nd_sub(values, indices, sent.values)
    return values - tf.reshape(sent, [-1])


def _mask_velocity(
    inputs: StepInputs, tensor: TensorSpec, velocity: tf.Tensor, result: Result
) -> tf.Tensor:
    """Clear the velocity of sent entries, unless the method sends all of them."""
    compressor = inputs.compressor
    if not isinstance(compressor, Sparsifier) or result.entries is None:
        return velocity
    return smart_cond(
        inputs.factor_masking,
        lambda: _clear_sent(compressor, tensor, velocity, result),
        lambda: velocity,
    )


def _clear_sent(
    compressor: Compressor, tensor: TensorSpec, velocity: tf.Tensor, result: Result
) -> tf.Tensor:
    sends_all = tf.equal(result.entries, tensor.size)
    if result.chosen is not None:
        masked = tf.where(_sent_mask(result), tf.zeros_like(velocity), velocity)
        return tf.where(sends_all, velocity, masked)
    if not isinstance(result.sent, SparseEntries):
        raise ValueError(
            f"{compressor!r} sends some entries and not others, so its "
            "`Result` must say which: pass `chosen`, or `factor_masking=False` to "
            f"the optimizer. Received: entries={result.entries}, chosen=None"
        )
    positions = result.sent.positions
    new_values = tf.where(sends_all, tf.gather(velocity, positions), 0)
    return tf.tensor_scatter_nd_update(velocity, positions[:, tf.newaxis], new_values)


def _sent_mask(result: Result) -> tf.Tensor:
    """Return whether each entry was sent, bool `[n]`; by value if unspecified."""
    if result.chosen is not None:
        return tf.reshape(result.chosen, [-1])
    if isinstance(result.sent, SparseEntries):
        return position_mask(result.sent)
    return tf.reshape(tf.not_equal(result.sent, 0), [-1])
