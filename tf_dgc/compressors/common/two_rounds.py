"""Methods of two rounds: what their native parts are told in between."""

import abc
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_dgc.compressors.base import Compressor

States: TypeAlias = Sequence[dict[str, Any]]
"""Variables of each tensor's state, by name."""


class TwoRounds(Compressor):
    """A method whose second round depends on what all say in the first.

    Its `Native` has a `first`. What is told is of all tensors that have two rounds, one
    after the other: a few numbers each, computed by TensorFlow operations.
    """

    def told_first(self, states: States) -> tf.Tensor:
        """Return what it is told in the first round, float32 `[tensors, m]`."""
        return tf.zeros([len(states), 0])

    @abc.abstractmethod
    def told_then(
        self, everyone: tf.Tensor, notes: tf.Tensor, states: States
    ) -> tf.Tensor:
        """Return what it is told in the second round, float32 `[tensors, m]`.

        Args:
            everyone: words of all workers in the first round, int32
                `[tensors, num_workers, w]`.
            notes: numbers that the first round leaves for this worker alone, float32
                `[tensors, m]`.
            states: variables of each tensor's state, by name.
        """

    def settle(
        self,
        told: tf.Tensor,
        notes: tf.Tensor,
        norms: tf.Tensor,
        states: States,
    ) -> list[dict[str, tf.Tensor]]:
        """Return new values of states that the native method does not update.

        Args:
            told: result of `told_then`.
            notes: numbers of the first round, see there.
            norms: norm of each tensor's sum, if the method notes it.
            states: variables of each tensor's state, by name.
        """
        del told, notes, norms
        return [{} for _ in states]
