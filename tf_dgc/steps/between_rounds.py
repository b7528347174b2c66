"""What native methods of two rounds are told between them, and what becomes of it."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_dgc.compressors.base import Compressor, Native
from tf_dgc.compressors.common.two_rounds import Ended, States, TwoRounds


class BetweenRounds:
    """Numbers that each tensor's method is told now, round after round.

    Args:
        compressor: method of all tensors that are not exempt.
        methods: native method of each tensor.
        states: variables of each tensor's state, by name.

    Attributes:
        num_rounds: number of rounds; the second one is of some tensors.
        are_sums: whether both rounds are sums.
    """

    def __init__(
        self, compressor: Compressor, methods: Sequence[Native], states: States
    ):
        self._methods = methods
        pairs = zip(states, methods, strict=True)
        self._states = [state for state, method in pairs if method.first]
        self.num_rounds = 2 if self._states else 1
        self.are_sums = any(method.first_summed for method in methods)
        asked = compressor if isinstance(compressor, TwoRounds) else None
        self._asked = asked if self._states else None
        self._notes = nothing = tf.zeros([len(self._states), 0])
        self._tell(self._asked.told_first(self._states) if self._asked else nothing)

    def operands(self) -> dict[str, Any]:
        """Return what the operations of this round take."""
        flat = [tf.reshape(told, [-1]) for told in self._told]
        counts = iter([told.shape[0] for told in flat])
        return {
            "numbers": tf.concat([tf.zeros([0]), *flat], axis=0),
            "num_numbers": [next(counts) if m.first else 0 for m in self._methods],
        }

    def hear_words(self, everyone: tf.Tensor, notes: tf.Tensor) -> None:
        """Take what was gathered in the first round.

        Args:
            everyone: words of all workers, int32 `[tensors, num_workers, w]`.
            notes: numbers that this worker noted, float32 `[tensors * m]`.
        """
        self._notes = tf.reshape(notes, [len(self._states), self._num_notes()])
        if self._asked:
            said = self._asked.told_then(everyone, self._notes, self._states)
            self._tell(said)

    def hear_sums(self, sums: Sequence[tf.Tensor]) -> None:
        """Take what was summed in the first round, of each tensor that has two."""
        self._told = list(sums)

    def hear_notes(self, notes: tf.Tensor) -> None:
        """Take what the second of two sums noted for the decoders."""
        if self.are_sums:
            lengths = [m.num_notes for m in self._methods if m.first]
            self._told = tf.split(notes, lengths)

    def settle(self, norms: tf.Tensor, sums: Sequence[tf.Tensor]) -> list[dict]:
        """Return new values of the states of tensors with two rounds.

        Args:
            norms: norm of each tensor's sum, if the method notes it.
            sums: sum over workers of each tensor's numbers in the second round.
        """
        if self._asked is None:
            return []
        ended = Ended(self._said, self._notes, norms, sums)
        return self._asked.settle(ended, self._states)

    def assign(self, new: Sequence[dict]) -> None:
        """Store what `settle` returned."""
        for state, values in zip(self._states, new, strict=False):
            for name, value in values.items():
                state[name].assign(value)

    def _tell(self, said: tf.Tensor | Sequence[tf.Tensor]) -> None:
        self._said = said
        of_each = tf.unstack(said) if tf.is_tensor(said) and self._states else said
        self._told = list(of_each) if self._states else []

    def _num_notes(self) -> int:
        return max(method.num_notes for method in self._methods)
