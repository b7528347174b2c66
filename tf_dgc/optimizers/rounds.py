"""Rounds: where each replica is between two exchanges, counted by calls."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc.choice import Choice

_CALLS, _IN_ROUND, _ROUNDS, _SKIPPED = range(4)


class Rounds:
    """Counts calls and rounds; call all but the constructor in replica context.

    Calls, not applied steps: who leaves out a step comes to the exchange all the same.

    Args:
        period: number of calls of a round, or a schedule of it.

    Attributes:
        variable: variable of this replica's numbers, int64.
    """

    def __init__(self, period: int | Callable):
        self._period = period
        # Of no aggregation: each replica counts by itself.
        self.variable = keras.Variable(
            initializer="zeros",
            shape=[4],
            dtype="int64",
            trainable=False,
            name="progress",
        )

    @property
    def number(self) -> tf.Tensor:
        """Number of the round, from 0, scalar int64."""
        return self._read()[_ROUNDS]

    def begins(self) -> Choice:
        """Return whether the round begins with this call."""
        return True if self._period == 1 else tf.equal(self._read()[_IN_ROUND], 0)

    def ends(self) -> Choice:
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
        calls, taken, rounds, skipped = tf.unstack(self._read())
        skipped += tf.cast(tf.logical_not(done), tf.int64)
        self.variable.assign(tf.stack([calls + 1, taken + 1, rounds, skipped]))

    def count_round(self) -> None:
        """Count a round that has ended."""
        calls, taken, rounds, skipped = tf.unstack(self._read())
        now = [calls, tf.zeros_like(taken), rounds + 1, skipped]
        self.variable.assign(tf.stack(now))

    def end(self, ends: Choice, exchange: Callable[[], None]) -> None:
        """Call `exchange` in replica context, if the round ends.

        A condition within a replica may not ask for others, so it is around all.
        """
        if ends is True:
            exchange()
            return

        def exchange_if(strategy: tf.distribute.Strategy, ends: Any) -> None:
            def by_all() -> tf.Tensor:
                strategy.extended.call_for_each_replica(exchange)
                return tf.constant(True)

            first = strategy.experimental_local_results(ends)[0]
            tf.cond(first, by_all, lambda: tf.constant(True))

        tf.distribute.get_replica_context().merge_call(exchange_if, args=(ends,))

    def _read(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.variable.value)


def num_skipped(copy: tf.Variable) -> int:
    """Return how many steps one replica left out, of its copy of `Rounds.variable`."""
    return int(copy.numpy()[_SKIPPED])


def num_taken(copy: tf.Variable) -> int:
    """Return how many calls of the round there were, of a copy of that variable."""
    return int(copy.numpy()[_IN_ROUND])
