"""A replica's position within its rounds, counted by calls of `apply`."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import conditions, schedules
from tf_dgc.conditions import BoolOrTensor
from tf_dgc.multiworker.worker_variables import ReplicaCopies

_CALLS, _IN_ROUND, _ROUNDS, _SKIPPED, _RESETS, _SINCE_CONSENSUS, _PENDING = range(7)


class RoundCounter:
    """Counts calls and rounds, in replica context.

    It counts calls rather than applied steps: a replica that skips a step still takes
    part in the synchronization.

    Args:
        period: number of calls of a round, or a schedule of it.
        strategy: strategy of the replicas.

    Attributes:
        variable: counts of this replica, int64 `[7]`.
    """

    def __init__(self, period: int | Callable, strategy: tf.distribute.Strategy):
        self._period, self._strategy = period, strategy
        # No aggregation: each replica counts by itself.
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

    def ends(self) -> BoolOrTensor:
        """Return whether the round ends with this call."""
        if self._period == 1:
            return True
        period, counts = self._period, self._read()
        if callable(period):
            period = schedules.period_at(period, counts[_CALLS] - counts[_IN_ROUND])
        return counts[_IN_ROUND] + 1 >= period

    def weights_equal(self) -> tf.Tensor:
        """Return whether all replicas have the same weights, scalar bool."""
        return tf.equal(self._read()[_SINCE_CONSENSUS], 0)

    def is_mean_due(self, delay: int, round_ends: BoolOrTensor) -> tf.Tensor:
        """Return whether the pending mean must be applied in this call, scalar bool.

        That is `delay` calls after its round, or when the next round ends.
        """
        counts = self._read()
        return tf.logical_and(
            counts[_PENDING] > 0, tf.logical_or(counts[_IN_ROUND] >= delay, round_ends)
        )

    def count_call(self, applied: tf.Tensor) -> None:
        """Count this call, and whether its step was applied, scalar bool."""
        skipped = tf.cast(tf.logical_not(applied), tf.int64)
        self.variable.assign(self._read() + tf.stack([1, 1, 0, skipped, 0, 1, 0]))

    def count_round(
        self, was_reset: tf.Tensor, weights_equal: bool, pending: bool = False
    ) -> None:
        """Count a round that has ended.

        Args:
            was_reset: whether this replica's inner state was reset, scalar bool.
            weights_equal: whether all replicas have the same weights now.
            pending: whether the mean is still being computed.
        """
        counts = self._read()
        since = -counts[_SINCE_CONSENSUS] if weights_equal else 0
        resets = tf.cast(was_reset, tf.int64)
        change = tf.stack([0, -counts[_IN_ROUND], 1, 0, resets, since, int(pending)])
        self.variable.assign(counts + change)

    def count_received_mean(self, weights_equal: bool) -> None:
        """Count the pending mean as applied."""
        counts = self._read()
        since = -counts[_SINCE_CONSENSUS] if weights_equal else 0
        change = tf.stack([0, 0, 0, 0, 0, since, -counts[_PENDING]])
        self.variable.assign(counts + change)

    def run_if(self, round_ends: BoolOrTensor, synchronize: Callable) -> None:
        """Call `synchronize` in replica context if the round ends."""
        if isinstance(round_ends, bool):
            synchronize()
        else:
            conditions.cond_in_all_replicas(round_ends, synchronize)

    # Outside of steps.

    def restart(self) -> None:
        """Let the next call begin a round, with the weights that the model has then."""
        keep = np.ones([7], np.int64)
        keep[[_IN_ROUND, _SINCE_CONSENSUS, _PENDING]] = 0
        for copy in ReplicaCopies(self._strategy, self.variable.value).local:
            copy.assign(copy.read_value() * keep)

    @property
    def calls_since_consensus(self) -> int:
        """Calls since all replicas had the same weights."""
        return self._max_over_replicas(_SINCE_CONSENSUS)

    @property
    def skipped(self) -> int:
        """Steps that a replica of this process skipped."""
        return self._max_over_replicas(_SKIPPED)

    @property
    def resets(self) -> int:
        """Rounds after which a replica of this process reset its inner state."""
        return self._max_over_replicas(_RESETS)

    def _max_over_replicas(self, index: int) -> int:
        copies = ReplicaCopies(self._strategy, self.variable.value).local
        return max(int(copy.numpy()[index]) for copy in copies)

    def _read(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.variable.value)
