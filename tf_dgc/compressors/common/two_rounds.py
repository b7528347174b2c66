"""Methods of two rounds: what their native parts are told in between."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc.compressors.base import Compressor

States: TypeAlias = Sequence[dict[str, Any]]
"""Variables of each tensor's state, by name."""


class Ended(NamedTuple):
    """What is known at the end of a step, of all tensors that have two rounds.

    Attributes:
        told: result of `told_then`, float32 `[tensors, m]`; of `told_first` if the
            rounds are sums.
        notes: numbers of the first round for this worker alone, float32 `[tensors, m]`.
        norms: norm of each tensor's sum, if the method notes it, float32 `[tensors]`.
        sums: sum over workers of each tensor's numbers in the second round, float32
            `[m]`; none if words were gathered.
    """

    told: Any
    notes: tf.Tensor
    norms: tf.Tensor
    sums: Sequence[tf.Tensor]


class TwoRounds(Compressor):
    """A method whose second round depends on what all say in the first.

    Its `Native` has a `first`. What is told is of all tensors that have two rounds, one
    after the other: numbers that are computed by TensorFlow operations. Where rounds
    are sums, the second one is told the first one's.
    """

    def told_first(self, states: States) -> tf.Tensor | Sequence[tf.Tensor]:
        """Return what it is told in the first round.

        Returns:
            Float32 `[tensors, m]`, or `[m]` of each tensor with an m of its own.
        """
        return tf.zeros([len(states), 0])

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
        raise NotImplementedError(f"{self!r} does not say what its second round takes.")

    def settle(self, ended: Ended, states: States) -> list[dict[str, tf.Tensor]]:
        """Return new values of states that the native method does not update.

        Args:
            ended: numbers that are known by now.
            states: variables of each tensor's state, by name.
        """
        del ended
        return [{} for _ in states]
