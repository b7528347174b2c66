"""The end of a round, of which the mean comes while the next one goes on."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import arguments, metrics
from tf_dgc.arguments import show
from tf_dgc.collectives import Gossip
from tf_dgc.compressors import Compressor
from tf_dgc.local import averaging, synchronizer
from tf_dgc.local.averaging import AveragingSynchronizer
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.multiworker import divergence
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.optimizers import conditions
from tf_dgc.optimizers.state import OptimizerState
from tf_dgc.optimizers.update import apply_update
from tf_dgc.smart_cond import BoolOrTensor
from tf_dgc.steps import implementations
from tf_dgc.steps.base import StepOutcome

# --- The parts of a model that take turns with a delay, and what both may be.


def split_fragments(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Return the places of tensors in parts of about the same number of entries.

    Args:
        sizes: entries of each tensor.
        number: number of parts.

    Raises:
        ValueError: for more parts than tensors.
    """
    if number > len(sizes):
        raise ValueError(
            "Each of `parts` needs a variable of the model. Use fewer. Received: "
            f"parts={number} with {len(sizes)} variables"
        )
    parts: list[list[int]] = [[] for _ in range(number)]
    filled = [0] * number
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = min(range(number), key=lambda part: (filled[part], len(parts[part])))
        parts[least].append(place)
        filled[least] += max(1, sizes[place])
    return [sorted(part) for part in parts]


def check_fragments(
    delay: Any,
    parts: Any,
    period: Any,
    compressor: Compressor,
    exchange: Any,
) -> tuple[int, int]:
    """Return both as ints; raise `ValueError` for those that cannot be.

    Args:
        delay: number of steps that a mean may take.
        parts: number of parts of the model.
        period: number of steps of a round, or a schedule.
        compressor: method.
        exchange: exchange, or its name.
    """
    delay = arguments.check_whole("delay", delay, 0, " of steps (0: none)")
    parts = arguments.check_whole("parts", parts, 1, " of parts of the model")
    given = f"Received: delay={delay}, parts={parts}, period={show(period)}"
    if delay and isinstance(exchange, Gossip):
        raise ValueError(
            "With `Gossip` a worker waits for its neighbours alone, and there is no "
            f"mean that could come later. Use `delay=0`. {given}, {exchange!r}"
        )
    if parts == 1:
        most = delay if callable(period) else period
    elif not delay:
        raise ValueError(
            f"`parts` take turns in the background, so pass a `delay`. {given}"
        )
    elif callable(period) or period % parts:
        raise ValueError(
            "With `parts` the `period` must be a number of steps that `parts` divides, "
            f"as one of them is exchanged every `period / parts`. {given}"
        )
    else:
        most = period // parts
    if delay > most:
        raise ValueError(
            "The mean of a round must be there before the next one is formed, so "
            f"`delay` must be `period / parts` at the most, here {most}. {given}"
        )
    if parts > 1 and compressor.together:
        raise ValueError(
            f"{compressor!r} sees all tensors as one, so they cannot take turns. Use "
            f"`parts=1`, or another method. {given}"
        )
    return delay, parts


def check_outer_with_fragments(outer: keras.optimizers.Optimizer, parts: int) -> None:
    """Raise `ValueError` for an outer optimizer whose step cannot be in parts.

    Args:
        outer: outer optimizer.
        parts: number of parts of the model.
    """
    if parts == 1:
        return
    given = f"Received: parts={parts}, outer={show(outer)}"
    if outer.use_ema:
        raise ValueError(
            "Averages of the outer optimizer are of all tensors, and with `parts` one "
            f"part of them arrives at a time. Use `parts=1`, or no `use_ema`. {given}"
        )
    if outer.global_clipnorm:
        raise ValueError(
            "The norm by which `global_clipnorm` clips is of all tensors, and with "
            "`parts` one part of them arrives at a time. Use `parts=1`, or let the "
            f"outer optimizer clip by `clipnorm`, each tensor by its own. {given}"
        )
    if isinstance(outer, keras.optimizers.Nadam):
        raise ValueError(
            "A `Nadam` keeps a number of its steps, which with `parts` it would take "
            f"once for each of them. Use `parts=1`, or `Adam` as `outer`. {given}"
        )


def fragment_period(optimizer: Any) -> Any:
    """Return how many steps lie between two exchanges, or a schedule of it."""
    parts = optimizer.parts
    return optimizer.period if parts == 1 else optimizer.period // parts


class DelayedSynchronizer(AveragingSynchronizer):
    """Moves the anchor some steps after a round, and each worker by what it lacks.

    With weights w a worker ends a round d = anchor - w away from the anchor. While the
    mean of all d is formed in the background, it goes on from w. Then the outer
    optimizer moves the anchor from a to a', and the worker by (a' - a) + d: the others'
    steps, in place of its own that are in the mean. What it has moved since is kept,
    and goes into the next round. Of parts of the model, a round exchanges one.

    Args:
        optimizer: `LocalOptimizer` whose rounds they are, its inner optimizer built.
        kept: variables that it keeps.
        variables: variables of the model.

    Attributes:
        moved: variable of each tensor and worker, what is under way of it.
        received: variable of each tensor, the mean that has come, equal on all workers.
    """

    def __init__(
        self, optimizer: Any, kept: OptimizerState, variables: Sequence[keras.Variable]
    ):
        super().__init__(optimizer, kept, variables)
        self.moved = [
            PerWorkerVariable(t.shape, t.dtype.name, f"{_stem(t)}_moved", "mean")
            for t in kept.tensors
        ]
        self.received = [
            SharedVariable(np.zeros(t.shape), t.dtype.name, f"{_stem(t)}_received")
            for t in kept.tensors
        ]
        self._parts = split_fragments([t.size for t in kept.tensors], optimizer.parts)
        self._lane = optimizer.background
        self._lane.work = self._exchange

    def begin(self, rounds: RoundCounter) -> None:
        """Take the anchor, if all workers have the same weights."""
        self._lane.check()
        averaging.update_anchor(self.anchor, self._variables, rounds.alike())

    def receive(self, rounds: RoundCounter, ends: BoolOrTensor) -> None:
        """Wait for what is under way, and move by it, if it is due.

        Args:
            rounds: rounds of the replicas.
            ends: whether a round ends with this call.
        """
        due = rounds.is_due(self._optimizer.delay, ends)
        conditions.cond_in_all_replicas(due, functools.partial(self._receive, rounds))

    def end(self, rounds: RoundCounter) -> None:
        """Begin an exchange, and count the round; in replica context."""
        parts = range(len(self._parts))
        launches = [functools.partial(self._begin, part, rounds) for part in parts]
        conditions.switch_in_all_replicas(rounds.number % len(launches), launches)

    def consensus(self, rounds: RoundCounter) -> None:
        """Exchange all parts, and let all workers have what comes of it."""
        self.receive(rounds, True)
        for _ in self._parts:
            self.end(rounds)
            self._receive(rounds, alike=True)

    # --- the beginning of an exchange ------------------------------------------------

    def _begin(self, part: int, rounds: RoundCounter) -> None:
        places, number = self._parts[part], rounds.number
        variables, anchor = self._of(places)
        moved = [
            a.local() - tf.convert_to_tensor(v.value)
            for a, v in zip(anchor, variables, strict=True)
        ]
        anew = self._inner.begin_anew_unless_finite(moved, self._kept.use_native)
        self._return_if(anew)
        self._inner.copy_weights(anew)
        for place, away in zip(places, moved, strict=True):
            kept = tf.where(anew, tf.zeros_like(away), away)
            self.moved[place].assign(tf.cast(kept, self.moved[place].dtype))

        def begin(_: Any, *values: Any) -> None:
            self._lane.begin(part, values)

        context = tf.distribute.get_replica_context()
        context.merge_call(begin, args=(number, *moved))
        rounds.count_round(anew, alike=False, under_way=True)

    def _return_if(self, wanted: tf.Tensor) -> None:
        """Let this replica have the anchor: its own weights, or its state, are lost."""
        variables, anchor = self._variables, self.anchor

        def back() -> tf.Tensor:
            _assign(variables, [a.local() for a in anchor])
            return tf.constant(True)

        tf.cond(wanted, back, lambda: tf.constant(False))

    def _exchange(self, part: int, number: tf.Tensor, *moved: tf.Tensor) -> None:
        """Form the mean; in the background, in replica context."""
        optimizer, made, places = self._optimizer, self._kept, self._parts[part]
        variables, anchor = self._of(places)
        # Of each part counted from 0: what takes turns would go by the part, else.
        turn = number // len(self._parts)
        step = implementations.start_step(
            averaging.delta_inputs(optimizer, made, places, moved, turn)
        )
        asks = turn, optimizer.check_every, optimizer.on_divergence
        check = divergence.create_check(self._strategy, anchor, *asks)
        outcome, asked = optimizer.communicator.run(step, check)
        if self.drift:
            self.drift.measure(moved, optimizer.communicator, optimizer.seed, number)
            asked += synchronizer.DISTANCE_BYTES
        sums, nonfinite = outcome.decode()
        for place, total in zip(places, sums, strict=True):
            into = self.received[place]
            into.assign(tf.cast(tf.reshape(total, into.shape), into.dtype))
        metrics.count_step(
            made.worker_state.counters,
            entries=outcome.entries,
            sent_bytes=outcome.sent_bytes + asked,
            dense_bytes=metrics.dense_bytes(variables),
            nonfinite=nonfinite,
        )

    # --- its end --------------------------------------------------------------------

    def _receive(self, rounds: RoundCounter, alike: bool = False) -> None:
        parts = range(len(self._parts))
        arrivals = [
            functools.partial(self._arrive, part, rounds, alike) for part in parts
        ]
        conditions.switch_in_all_replicas((rounds.number - 1) % len(arrivals), arrivals)

    def _arrive(self, part: int, rounds: RoundCounter, alike: bool) -> None:
        """Move anchor and worker by what has come; in replica context."""
        context = tf.distribute.get_replica_context()
        come = context.merge_call(lambda _: self._lane.wait())
        places = self._parts[part]
        variables, anchor = self._of(places)
        with tf.control_dependencies([come]):
            sums = [self.received[place].local() for place in places]
        own = [tf.convert_to_tensor(v.value) for v in variables]
        before = [a.local() for a in anchor]
        with tf.control_dependencies([*own, *sums]):
            _assign(variables, before)
        rule = self._optimizer.outer_optimizer
        outcome = StepOutcome(lambda: (sums, tf.constant(0)), 0, 0)
        apply_update(rule, outcome, variables, self._kept.use_native)
        if part + 1 < len(self._parts):
            rule.iterations.assign_sub(1)  # one for all parts
        after = [tf.convert_to_tensor(v.value) for v in variables]
        if not alike:
            lack = [
                (b - a) + tf.cast(self.moved[place].local(), a.dtype)
                for place, a, b in zip(places, before, after, strict=True)
            ]
            with tf.control_dependencies(after):
                _assign(variables, [w + x for w, x in zip(own, lack, strict=True)])
        for a, value in zip(anchor, after, strict=True):
            a.assign(value)
        rounds.count_arrival(alike)

    def _of(self, places: Sequence[int]) -> tuple[list, list[SharedVariable]]:
        """Return variables of the model, and their anchors."""
        variables = self._variables
        return [variables[p] for p in places], [self.anchor[p] for p in places]


def _stem(tensor: Any) -> str:
    return tensor.label.replace("/", "_")


def _assign(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
    """Assign this replica's own copies."""
    for variable, value in zip(variables, values, strict=True):
        tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)
