"""Delayed synchronization, of the whole model or of one fragment at a time.

Workers continue with local steps while the mean is computed in the background. With
fragments this is Streaming DiLoCo (Douillard et al., 2025).
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import arguments, conditions
from tf_dgc.arguments import show
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import Gossip
from tf_dgc.compressors import Compressor
from tf_dgc.conditions import BoolOrTensor
from tf_dgc.local.averaging import AveragingSynchronizer, parameter_deltas
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.local.synchronizer import assign_weights
from tf_dgc.multiworker.background import BackgroundReduction
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.optimizers.state import OptimizerState
from tf_dgc.optimizers.update import apply_update
from tf_dgc.steps.base import StepOutcome

if TYPE_CHECKING:
    from tf_dgc.local.optimizer import LocalOptimizer


class DelayedSynchronizer(AveragingSynchronizer):
    """Applies the mean parameter delta some steps after the round.

    A worker with weights w ends a round with the delta d = anchor - w. It continues
    from w while the mean of all deltas is computed in the background. Then the outer
    optimizer moves the anchor from a to a', and the worker moves by (a' - a) + d: its
    own steps of that round are replaced by the mean. Its steps since then are kept and
    enter the next round. With fragments, each round synchronizes one of them.

    Attributes:
        sent_deltas: per-worker variable of each tensor: the delta whose mean is
            pending.
        received_sums: variable of each tensor: the mean, equal on all workers.
    """

    def __init__(
        self,
        optimizer: "LocalOptimizer",
        state: OptimizerState,
        variables: Sequence[keras.Variable],
    ):
        super().__init__(optimizer, state, variables)
        self.sent_deltas = [
            PerWorkerVariable(t.shape, t.dtype.name, f"{_stem(t)}_moved", "mean")
            for t in state.tensors
        ]
        self.received_sums = [
            SharedVariable(np.zeros(t.shape), t.dtype.name, f"{_stem(t)}_received")
            for t in state.tensors
        ]
        sizes = [t.size for t in state.tensors]
        self._fragments = split_fragments(sizes, optimizer.fragments)
        self._background = cast(BackgroundReduction, optimizer.background)
        self._background.work = self._compute_mean

    def start_round(self, rounds: RoundCounter) -> None:
        """Copy the weights to the anchor if all workers have the same."""
        self._background.check()
        self._update_anchor(rounds.weights_equal())

    def apply_mean_if_due(self, rounds: RoundCounter, round_ends: BoolOrTensor) -> None:
        """Wait for the pending mean and apply it, if the delay is over.

        Args:
            rounds: rounds of the replicas.
            round_ends: whether the round ends with this call.
        """
        due = rounds.is_mean_due(self._optimizer.delay, round_ends)
        conditions.cond_in_all_replicas(due, lambda: self._apply_mean(rounds))

    def synchronize(self, rounds: RoundCounter) -> None:
        """Start computing the mean of one fragment, and count the round."""
        indices = range(len(self._fragments))
        branches = [functools.partial(self._start_mean, i, rounds) for i in indices]
        conditions.switch_in_all_replicas(rounds.number % len(branches), branches)

    def reach_consensus(self, rounds: RoundCounter) -> None:
        """Synchronize all fragments without delay."""
        self.apply_mean_if_due(rounds, True)
        for _ in self._fragments:
            self.synchronize(rounds)
            self._apply_mean(rounds, weights_equal=True)

    def _start_mean(self, fragment: int, rounds: RoundCounter) -> None:
        round_number = rounds.number
        variables, anchor = self._fragment_variables(fragment)
        deltas = parameter_deltas(anchor, variables)
        was_reset = self._inner_state.reset_if_nonfinite(deltas, self._state.use_native)
        self._return_to_anchor_if(was_reset)
        self._inner_state.copy_weights(was_reset)
        for index, delta in zip(self._fragments[fragment], deltas, strict=True):
            sent = tf.where(was_reset, tf.zeros_like(delta), delta)
            variable = self.sent_deltas[index]
            variable.assign(tf.cast(sent, variable.dtype))

        def start(_: tf.distribute.Strategy, *values: Any) -> None:
            self._background.begin(fragment, values)

        context = tf.distribute.get_replica_context()
        context.merge_call(start, args=(round_number, *deltas))
        rounds.count_round(was_reset, weights_equal=False, pending=True)

    def _return_to_anchor_if(self, was_reset: tf.Tensor) -> None:
        def assign() -> tf.Tensor:
            assign_weights(self._variables, [a.local() for a in self.anchor])
            return tf.constant(True)

        tf.cond(was_reset, assign, lambda: tf.constant(False))

    def _compute_mean(
        self, fragment: int, round_number: tf.Tensor, *deltas: tf.Tensor
    ) -> None:
        """Exchange the deltas; runs in the background, in replica context."""
        indices = self._fragments[fragment]
        variables, anchor = self._fragment_variables(fragment)
        # Counted from 0 for each fragment: methods that select entries in turn would
        # otherwise skip some.
        iteration = round_number // len(self._fragments)
        outcome, extra_bytes = self._exchange(indices, deltas, anchor, iteration)
        extra_bytes += self._measure_distance(deltas, round_number)
        sums, nonfinite = outcome.decode()
        for index, total in zip(indices, sums, strict=True):
            variable = self.received_sums[index]
            variable.assign(tf.cast(tf.reshape(total, variable.shape), variable.dtype))
        sent_bytes = outcome.sent_bytes + extra_bytes
        self._count(outcome.entries, sent_bytes, variables, nonfinite)

    def _apply_mean(self, rounds: RoundCounter, weights_equal: bool = False) -> None:
        """Wait for the pending mean and apply it to its fragment."""
        indices = range(len(self._fragments))
        branches = [
            functools.partial(self._apply_fragment, i, rounds, weights_equal)
            for i in indices
        ]
        conditions.switch_in_all_replicas((rounds.number - 1) % len(branches), branches)

    def _apply_fragment(
        self, fragment: int, rounds: RoundCounter, weights_equal: bool
    ) -> None:
        context = tf.distribute.get_replica_context()
        received = context.merge_call(lambda _: self._background.wait())
        indices = self._fragments[fragment]
        variables, anchor = self._fragment_variables(fragment)
        with tf.control_dependencies([received]):
            sums = [self.received_sums[i].local() for i in indices]
        weights = [tf.convert_to_tensor(v.value) for v in variables]
        old_anchor = [a.local() for a in anchor]
        with tf.control_dependencies([*weights, *sums]):
            assign_weights(variables, old_anchor)
        outer = self._optimizer.outer_optimizer
        outcome = StepOutcome(lambda: (sums, tf.constant(0)), 0, 0)
        apply_update(outer, outcome, variables, self._state.use_native)
        if fragment + 1 < len(self._fragments):
            outer.iterations.assign_sub(1)  # one iteration for all fragments
        new_anchor = [tf.convert_to_tensor(v.value) for v in variables]
        if not weights_equal:
            new_weights = [
                w + ((new - old) + tf.cast(self.sent_deltas[i].local(), old.dtype))
                for w, i, old, new in zip(
                    weights, indices, old_anchor, new_anchor, strict=True
                )
            ]
            with tf.control_dependencies(new_anchor):
                assign_weights(variables, new_weights)
        for a, value in zip(anchor, new_anchor, strict=True):
            a.assign(value)
        rounds.count_received_mean(weights_equal)

    def _fragment_variables(
        self, fragment: int
    ) -> tuple[list[keras.Variable], list[SharedVariable]]:
        """Return a fragment's model variables and their anchors."""
        indices, variables = self._fragments[fragment], self._variables
        return [variables[i] for i in indices], [self.anchor[i] for i in indices]


def _stem(tensor: TensorSpec) -> str:
    return tensor.label.replace("/", "_")


def fragment_period(optimizer: "LocalOptimizer") -> Any:
    """Return the number of steps between two synchronizations, or its schedule."""
    fragments: Any = optimizer.fragments
    return optimizer.period if fragments == 1 else optimizer.period // fragments


def split_fragments(sizes: Sequence[int], num_fragments: int) -> list[list[int]]:
    """Return the indices of tensors in fragments of similar numbers of entries.

    Args:
        sizes: number of entries of each tensor.
        num_fragments: number of fragments.

    Raises:
        ValueError: for more fragments than tensors.
    """
    if num_fragments > len(sizes):
        raise ValueError(
            "Each of `fragments` needs a variable of the model. Use fewer. Received: "
            f"fragments={num_fragments} with {len(sizes)} variables"
        )
    fragments: list[list[int]] = [[] for _ in range(num_fragments)]
    totals = [0] * num_fragments
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        smallest = min(
            range(num_fragments), key=lambda f: (totals[f], len(fragments[f]))
        )
        fragments[smallest].append(index)
        totals[smallest] += max(1, sizes[index])
    return [sorted(fragment) for fragment in fragments]


def check_fragments(
    delay: Any, fragments: Any, period: Any, compressor: Compressor, collective: Any
) -> tuple[int, int]:
    """Return both as ints; raise `ValueError` if they are invalid."""
    delay = arguments.check_whole("delay", delay, 0, " of steps (0: none)")
    fragments = arguments.check_whole(
        "fragments", fragments, 1, " of fragments of the model"
    )
    received = f"Received: delay={delay}, fragments={fragments}, period={show(period)}"
    if delay and isinstance(collective, Gossip):
        raise ValueError(
            "With `Gossip` a worker waits for its neighbors only, so there is no mean "
            f"to delay. Use `delay=0`. {received}, {collective!r}"
        )
    if fragments == 1:
        longest = delay if callable(period) else period
    elif not delay:
        raise ValueError(
            "`fragments` are synchronized in the background, so pass a `delay`. "
            f"{received}"
        )
    elif callable(period) or period % fragments:
        raise ValueError(
            "With `fragments` the `period` must be a number of steps that `fragments` "
            "divides, as one fragment is exchanged every `period / fragments` steps. "
            f"{received}"
        )
    else:
        longest = period // fragments
    if delay > longest:
        raise ValueError(
            "The mean of a round must arrive before the next round ends, so `delay` "
            f"must be at most `period / fragments`, here {longest}. {received}"
        )
    if fragments > 1 and compressor.entire_model:
        raise ValueError(
            f"{compressor!r} compresses all tensors as one, so they cannot be "
            f"exchanged in fragments. Use `fragments=1`, or another method. {received}"
        )
    return delay, fragments


def check_outer_with_fragments(
    outer: keras.optimizers.Optimizer, fragments: int
) -> None:
    """Raise `ValueError` for an outer optimizer that cannot update fragments."""
    if fragments == 1:
        return
    received = f"Received: fragments={fragments}, outer={show(outer)}"
    if outer.use_ema:
        raise ValueError(
            "The outer optimizer's `use_ema` averages all tensors at once, and with "
            "`fragments` one fragment is updated at a time. Use `fragments=1`, or no "
            f"`use_ema`. {received}"
        )
    if outer.global_clipnorm:
        raise ValueError(
            "`global_clipnorm` uses the norm of all tensors, and with `fragments` one "
            "fragment is updated at a time. Use `fragments=1`, or let the outer "
            f"optimizer clip by `clipnorm`, each tensor by its own norm. {received}"
        )
    if isinstance(outer, keras.optimizers.Nadam):
        raise ValueError(
            "`Nadam` updates a momentum product in every step, which with `fragments` "
            "would happen once for each fragment. Use `fragments=1`, or `Adam` as "
            f"`outer`. {received}"
        )
