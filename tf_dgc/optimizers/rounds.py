"""Rounds: where each replica is between two exchanges, counted by calls."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc.choice import Choice
from tf_dgc.distribute.copies import Copies
from tf_dgc.optimizers import conditions

_CALLS, _IN_ROUND, _ROUNDS, _SKIPPED, _RESETS = range(5)


class Rounds:
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
            shape=[5],
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
        left_out = tf.cast(tf.logical_not(done), tf.int64)
        self.variable.assign(self._read() + tf.stack([1, 1, 0, left_out, 0]))

    def count_round(self, anew: tf.Tensor) -> None:
        """Count a round that has ended.

        Args:
            anew: whether this replica's inner state was reset, scalar bool.
        """
        now = self._read()
        ended = tf.stack([0, -now[_IN_ROUND], 1, 0, tf.cast(anew, tf.int64)])
        self.variable.assign(now + ended)

    def end(self, ends: Choice, exchange: Callable[[], None]) -> None:
        """Call `exchange` in replica context, if the round ends."""
        if isinstance(ends, bool):
            exchange()
        else:
            conditions.call_if(ends, exchange)

    # --- outside of steps -----------------------------------------------------------

    @property
    def taken(self) -> int:
        """Calls that there were in this round."""
        return self._most(_IN_ROUND)

    @property
    def skipped(self) -> int:
        """Steps that a replica of this process left out."""
        return self._most(_SKIPPED)

    @property
    def resets(self) -> int:
        """Rounds after which a replica of this process reset its inner state."""
        return self._most(_RESETS)

    def _most(self, place: int) -> int:
        copies = Copies(self._strategy, self.variable.value).local
        return max(int(copy.numpy()[place]) for copy in copies)

    def _read(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.variable.value)
