"""Endings: what workers do about each other when a round of local steps ends."""

import abc
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers
from tf_dgc.distribute.worker_variables import SharedVariable
from tf_dgc.local import drift
from tf_dgc.local.inner_state import InnerState
from tf_dgc.local.rounds import Rounds
from tf_dgc.optimizers.kept import Kept


class Ending(abc.ABC):
    """Begins rounds, and ends them by an exchange.

    Args:
        optimizer: `LocalOptimizer` whose rounds they are, its inner optimizer built.
        kept: variables that it keeps.
        variables: variables of the model.

    Attributes:
        anchor: variable of each variable of the model, the same on all workers; none
            where there is no such thing.
        drift: measure of how far the workers are apart; None unless it is tracked.
    """

    def __init__(self, optimizer: Any, kept: Kept, variables: Sequence[keras.Variable]):
        self._optimizer, self._kept = optimizer, kept
        self._strategy = tf.distribute.get_strategy()
        inner = optimizer.inner_optimizer
        self._inner = InnerState(inner, variables, self._strategy)
        self.anchor: list[SharedVariable] = []
        self.drift = drift.Drift() if optimizer.track_drift else None

    @property
    def _variables(self) -> list[keras.Variable]:
        return keras_optimizers.trainable_variables(self._optimizer)

    @abc.abstractmethod
    def begin(self, rounds: Rounds) -> None:
        """Do what is due before a step; in replica context."""

    @abc.abstractmethod
    def end(self, rounds: Rounds) -> None:
        """Exchange, and count the round; in replica context."""

    @abc.abstractmethod
    def consensus(self, rounds: Rounds) -> None:
        """Do the same as `end`, and leave all workers alike."""

    @abc.abstractmethod
    def agreed(self, what: str) -> list[list[tf.Tensor]]:
        """Return what all workers have alike, outside of steps.

        Args:
            what: name of the use, for errors.

        Returns:
            Values of each variable, one per local replica.
        """
