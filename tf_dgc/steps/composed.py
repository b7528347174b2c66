"""A step composed of any method's exchanges, tensor by tensor."""

import inspect
from collections.abc import Generator, Sequence
from typing import TypeAlias

import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.choice import add_up, choose
from tf_dgc.codecs import value_types, wire
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.collectives import rounds
from tf_dgc.collectives.requests import (
    Entries,
    Exchange,
    Message,
    Reply,
    Result,
    marks,
    whole,
)
from tf_dgc.collectives.rounds import Part
from tf_dgc.compressors.base import Compressor, Draw
from tf_dgc.compressors.common.one_round import (
    send_coded,
    send_rounded,
    send_whole,
)
from tf_dgc.compressors.draws import draw_ties
from tf_dgc.steps.accumulation import accumulate
from tf_dgc.steps.base import Inputs, Outcome, Step
from tf_dgc.steps.views import views

States: TypeAlias = dict[str, tf.Tensor]


def begin(inputs: Inputs) -> Step:
    """Return the step; every method has one."""
    return _step(inputs)


def _step(inputs: Inputs) -> Step:
    tensors, memory = inputs.tensors, inputs.memory
    velocity, values, finite = accumulate(
        tensors,
        inputs.gradients,
        inputs.scales,
        memory.velocity or None,
        memory.residual or None,
        inputs.momentum,
        inputs.nesterov,
        inputs.divisors,
        inputs.compressor.feedback_decay,
    )
    memory.warn_of(finite, inputs.iteration)
    # Other sums are as wide as their terms, and are refused when they overflow.
    bounds = not inputs.compressor.respects_largest
    within = [
        value_types.at_most(v, t.largest) if bounds and t.narrow else v
        for t, v in zip(tensors, values, strict=True)
    ]
    ties = draw_ties(inputs.seed, inputs.iteration, len(inputs.sizes))
    seeds = inputs.seed, inputs.iteration
    draws = [
        Draw(*seeds, i, inputs.worker, ties, t.largest, inputs.num_workers)
        for i, t in zip(inputs.indices, tensors, strict=True)
    ]
    states = memory.read(inputs.compressor.reads_residual)
    if inputs.compressor.reads_residual:
        # So that a method finds the gradient where values were bounded, too.
        for state, bounded, v in zip(states, within, values, strict=True):
            if bounded is not v:
                state["residual"] += tf.reshape(bounded - v, state["residual"].shape)
    common = memory.read_common()
    merged, common = yield from run_exchanges(
        inputs.compressor,
        tensors,
        within,
        states,
        common,
        draws,
        finite,
        inputs.sums_exempt,
    )
    memory.store_common(common)
    _keep(inputs, velocity, values, merged.results)
    sent = zip(tensors, merged.results, strict=True)
    return Outcome(
        decode=lambda: ([whole(r.sum) for r in merged.results], merged.nonfinite),
        entries=add_up([t.size if r.entries is None else r.entries for t, r in sent]),
        sent_bytes=merged.sent_bytes,
    )


def run_exchanges(
    compressor: Compressor,
    tensors: Sequence[Tensor],
    values: Sequence[tf.Tensor],
    states: Sequence[States],
    common: States,
    draws: Sequence[Draw],
    finite: tf.Tensor,
    exempt_apart: bool = False,
) -> Generator[list[Message], list[Reply], tuple[rounds.Outcome, States]]:
    """Run the exchanges of one worker's tensors.

    Args:
        compressor: method of all tensors that are not exempt.
        tensors: descriptions of those that have a gradient in this step.
        values: values that each may send, float `[n]`.
        states: state of the method by name, for each; empty if exempt.
        common: state of the method by name, of all at once.
        draws: seeds of this step, for each.
        finite: scalar bool, whether this worker's gradient was finite.
        exempt_apart: whether exempt tensors are summed, whatever the others are.

    Returns:
        What came of it, with a result for each tensor; and the new `common`.
    """
    exempt_by = "sum" if exempt_apart else compressor.aggregation
    seen = views(tensors, compressor.together)
    parts = []
    for view in seen:
        shaped, state = view.values(values), {**view.state(states), **common}
        if view.seen.exempt:
            parts.append(_exempt_part(view.seen, shaped, exempt_by))
        else:
            parts.append(_part(compressor, view.seen, shaped, state, view.draw(draws)))
    merged = yield from rounds.merge(parts, finite)
    results: dict[int, Result] = {}
    for view, result in zip(seen, merged.results, strict=True):
        results.update(zip(view.places, view.results(result, states), strict=True))
        changed = result.state or {}
        common = {name: changed.get(name, value) for name, value in common.items()}
    own = merged._replace(results=[results[i] for i in range(len(tensors))])
    return own, common


def _exempt_part(tensor: Tensor, values: tf.Tensor, aggregation: str) -> Part:
    within = value_types.at_most(values, tensor.largest)
    if tensor.exempt_dtype:
        stated, exchange = _coded(tensor, within, aggregation)
    else:
        stated = tensor.size * tensor.dtype.size
        exchange = send_whole(within, aggregation)
    return Part(tensor.label, tensor.agreed, stated, exchange, tensor.narrow)


def _coded(tensor: Tensor, values: tf.Tensor, aggregation: str) -> tuple[int, Exchange]:
    """Return the bytes and the exchange of an exempt tensor that is coded."""
    if aggregation == "sum":
        return tf.bfloat16.size * tensor.size, send_rounded(values, tf.bfloat16)
    flat = tf.reshape(values, [-1])
    return 4 * wire.exempt_words([tensor]), send_coded(flat, tensor.value_type)


def _part(
    compressor: Compressor,
    tensor: Tensor,
    values: tf.Tensor,
    state: dict[str, tf.Tensor],
    draw: Draw,
) -> Part:
    """Begin a method's exchange."""
    begun = compressor.exchange(values, state, draw)
    _check_generator(compressor, begun)
    return Part(
        f"{compressor!r} on {tensor.label}",
        tensor.agreed_by(compressor.name),
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
    inputs: Inputs,
    velocity: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    results: Sequence[Result],
) -> None:
    """Store what was not sent, velocity where nothing was sent, and the state."""
    memory = inputs.memory
    pairs = zip(values, results, strict=True)
    memory.store_residual([_left(v, r.sent) for v, r in pairs])
    if memory.last_sent:
        memory.last_sent.count_step()
        chosen = [_chosen(r) for r in results]
        memory.last_sent.record_chosen(inputs.indices, chosen)
    if memory.velocity:
        memory.store_velocity(
            [
                _mask(inputs, t, v, r)
                for t, v, r in zip(inputs.tensors, velocity, results, strict=True)
            ]
        )
    memory.store_states([r.state or {} for r in results])


def _left(values: tf.Tensor, sent: tf.Tensor | Entries) -> tf.Tensor:
    """Return what was not sent, `[n]`: of `Entries` in the memory of the values."""
    if not isinstance(sent, Entries):
        return values - tf.reshape(sent, [-1])
    at = sent.positions[:, tf.newaxis]
    return tf.tensor_scatter_nd_sub(values, at, sent.values)


def _mask(
    inputs: Inputs, tensor: Tensor, velocity: tf.Tensor, result: Result
) -> tf.Tensor:
    """Clear the velocity where entries went out, unless all did."""
    compressor = inputs.compressor
    partial = compressor.kind == "sparsification" and result.entries is not None
    if not partial:
        return velocity
    return choose(
        inputs.factor_masking,
        lambda: _cleared(compressor, tensor, velocity, result),
        lambda: velocity,
    )


def _cleared(
    compressor: Compressor, tensor: Tensor, velocity: tf.Tensor, result: Result
) -> tf.Tensor:
    sent = result.sent
    if result.chosen is None and isinstance(sent, Entries):
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
    if chosen is None and isinstance(sent, Entries):
        return marks(sent)
    chosen = tf.not_equal(sent, 0) if chosen is None else chosen
    return tf.reshape(chosen, [-1])
