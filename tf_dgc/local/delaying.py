"""The end of a round, of which the mean comes while the next one goes on."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.choice import Choice
from tf_dgc.distribute import divergence
from tf_dgc.distribute.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.inner import conditions
from tf_dgc.inner.updating import update
from tf_dgc.local import drift, moving, turns
from tf_dgc.local.averaging import Averaging
from tf_dgc.local.rounds import Rounds
from tf_dgc.metrics import counting
from tf_dgc.optimizers.kept import Kept
from tf_dgc.steps import kinds
from tf_dgc.steps.base import Outcome


class Delaying(Averaging):
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

    def __init__(self, optimizer: Any, kept: Kept, variables: Sequence[keras.Variable]):
        super().__init__(optimizer, kept, variables)
        self.moved = [
            PerWorkerVariable(t.shape, t.dtype.name, f"{_stem(t)}_moved", "mean")
            for t in kept.tensors
        ]
        self.received = [
            SharedVariable(np.zeros(t.shape), t.dtype.name, f"{_stem(t)}_received")
            for t in kept.tensors
        ]
        self._parts = turns.split([t.size for t in kept.tensors], optimizer.parts)
        self._lane = optimizer.background
        self._lane.work = self._exchange

    def begin(self, rounds: Rounds) -> None:
        """Take the anchor, if all workers have the same weights."""
        self._lane.check()
        moving.cast_anchor(self.anchor, self._variables, rounds.alike())

    def receive(self, rounds: Rounds, ends: Choice) -> None:
        """Wait for what is under way, and move by it, if it is due.

        Args:
            rounds: rounds of the replicas.
            ends: whether a round ends with this call.
        """
        due = rounds.is_due(self._optimizer.delay, ends)
        conditions.call_if(due, functools.partial(self._receive, rounds))

    def end(self, rounds: Rounds) -> None:
        """Begin an exchange, and count the round; in replica context."""
        parts = range(len(self._parts))
        launches = [functools.partial(self._begin, part, rounds) for part in parts]
        conditions.call_one(rounds.number % len(launches), launches)

    def consensus(self, rounds: Rounds) -> None:
        """Exchange all parts, and let all workers have what comes of it."""
        self.receive(rounds, True)
        for _ in self._parts:
            self.end(rounds)
            self._receive(rounds, alike=True)

    # --- the beginning of an exchange ------------------------------------------------

    def _begin(self, part: int, rounds: Rounds) -> None:
        places, number = self._parts[part], rounds.number
        variables, anchor = self._of(places)
        moved = [
            a.local() - tf.convert_to_tensor(v.value)
            for a, v in zip(anchor, variables, strict=True)
        ]
        anew = self._inner.begin_anew_unless_finite(moved, self._kept.natively)
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
        step = kinds.begin(moving.collect(optimizer, made, places, moved, turn))
        asks = turn, optimizer.check_every, optimizer.on_divergence
        check = divergence.make_check(self._strategy, anchor, *asks)
        outcome, asked = optimizer.communicator.run(step, check)
        if self.drift:
            self.drift.measure(moved, optimizer.communicator, optimizer.seed, number)
            asked += drift.NUM_BYTES
        sums, nonfinite = outcome.decode()
        for place, total in zip(places, sums, strict=True):
            into = self.received[place]
            into.assign(tf.cast(tf.reshape(total, into.shape), into.dtype))
        counting.count_step(
            made.memory.counters,
            entries=outcome.entries,
            sent_bytes=outcome.sent_bytes + asked,
            dense_bytes=counting.dense_bytes(variables),
            nonfinite=nonfinite,
        )

    # --- its end --------------------------------------------------------------------

    def _receive(self, rounds: Rounds, alike: bool = False) -> None:
        parts = range(len(self._parts))
        arrivals = [
            functools.partial(self._arrive, part, rounds, alike) for part in parts
        ]
        conditions.call_one((rounds.number - 1) % len(arrivals), arrivals)

    def _arrive(self, part: int, rounds: Rounds, alike: bool) -> None:
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
        outcome = Outcome(lambda: (sums, tf.constant(0)), 0, 0)
        update(rule, outcome, variables, self._kept.natively)
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
