"""Rounds: where each replica is between two exchanges, counted by calls."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc.multiworker.worker_variables import ReplicaCopies
from tf_dgc.optimizers import conditions
from tf_dgc.smart_cond import BoolOrTensor

_CALLS, _IN_ROUND, _ROUNDS, _SKIPPED, _RESETS, _APART, _UNDER_WAY = range(7)


class RoundCounter:
    """Counts calls and rounds, in replica context.

    Calls, not applied steps: who leaves out a step comes to the exchange all the same.

    Args:
        period: number of calls of a round, or a schedule of it.
        strategy: strategy of the replicas.

    Attributes:
        variable: variable of this replica's numbers, int64.
    """

    def __init__(self, period: int | Callable, strategy: tf.distribute.Strategy):
        self._period, self._strategy = period, strategy
        # Of no aggregation: each replica counts by itself.
        self.variable = keras.Variable(
            initializer="zeros",
            shape=[7],
            dtype="int64",
            trainable=False,
            name="progress",
        )

    @property
    def number(self) -> tf.Tensor:
        """Number of the round, from 0, scalar int64."""
        return self._read()[_ROUNDS]

    def begins(self) -> BoolOrTensor:
        """Return whether the round begins with this call."""
        return True if self._period == 1 else tf.equal(self._read()[_IN_ROUND], 0)

    def alike(self) -> tf.Tensor:
        """Return whether all replicas have the same weights, scalar bool."""
        return tf.equal(self._read()[_APART], 0)

    def is_due(self, delay: int, ends: BoolOrTensor) -> tf.Tensor:
        """Return whether what a round ended with is to be waited for, scalar bool.

        Args:
            delay: number of calls after it, if no round ends before.
            ends: whether the round ends with this call, which was counted.
        """
        numbers = self._read()
        soon = tf.logical_or(numbers[_IN_ROUND] >= delay, ends)
        return tf.logical_and(numbers[_UNDER_WAY] > 0, soon)

    def ends(self) -> BoolOrTensor:
        """Return whether the round ends with this call."""
        if self._period == 1:
            return True
        period, numbers = self._period, self._read()
        if callable(period):
            first = numbers[_CALLS] - numbers[_IN_ROUND]
            period = schedules.period_at(period, first)
        return numbers[_IN_ROUND] + 1 >= period

    def count_call(self, done: tf.Tensor) -> None:
        """Count this call, and whether its step was done, scalar bool."""
        left_out = tf.cast(tf.logical_not(done), tf.int64)
        self.variable.assign(self._read() + tf.stack([1, 1, 0, left_out, 0, 1, 0]))

    def count_round(
        self, anew: tf.Tensor, alike: bool, under_way: bool = False
    ) -> None:
        """Count a round that has ended.

        Args:
            anew: whether this replica's inner state was reset, scalar bool.
            alike: whether all replicas have the same weights now.
            under_way: whether what it ended with is still under way.
        """
        now = self._read()
        apart = -now[_APART] if alike else 0
        reset, begun = tf.cast(anew, tf.int64), int(under_way)
        ended = tf.stack([0, -now[_IN_ROUND], 1, 0, reset, apart, begun])
        self.variable.assign(now + ended)

    def count_arrival(self, alike: bool) -> None:
        """Count what was under way and has come.

        Args:
            alike: whether all replicas have the same weights now.
        """
        now = self._read()
        apart = -now[_APART] if alike else 0
        come = tf.stack([0, 0, 0, 0, 0, apart, -now[_UNDER_WAY]])
        self.variable.assign(now + come)

    def end(self, ends: BoolOrTensor, exchange: Callable[[], None]) -> None:
        """Call `exchange` in replica context, if the round ends."""
        if isinstance(ends, bool):
            exchange()
        else:
            conditions.cond_in_all_replicas(ends, exchange)

    # --- outside of steps -----------------------------------------------------------

    def begin_anew(self) -> None:
        """Let the next call begin a round, with the weights that there are then."""
        kept = np.ones([7], np.int64)
        kept[[_IN_ROUND, _APART, _UNDER_WAY]] = 0
        for copy in ReplicaCopies(self._strategy, self.variable.value).local:
            copy.assign(copy.read_value() * kept)

    @property
    def apart(self) -> int:
        """Calls since all replicas had the same weights."""
        return self._most(_APART)

    @property
    def skipped(self) -> int:
        """Steps that a replica of this process left out."""
        return self._most(_SKIPPED)

    @property
    def resets(self) -> int:
        """Rounds after which a replica of this process reset its inner state."""
        return self._most(_RESETS)

    def _most(self, place: int) -> int:
        copies = ReplicaCopies(self._strategy, self.variable.value).local
        return max(int(copy.numpy()[place]) for copy in copies)

    def _read(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.variable.value)
