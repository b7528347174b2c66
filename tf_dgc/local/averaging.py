"""The end of a round: by the mean of what all workers moved, from the anchor."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.distribute import divergence
from tf_dgc.distribute.copies import Copies
from tf_dgc.inner.updating import update
from tf_dgc.local import drift, moving
from tf_dgc.local.ending import Ending
from tf_dgc.local.rounds import Rounds
from tf_dgc.metrics import counting
from tf_dgc.optimizers.kept import Kept
from tf_dgc.steps import kinds


class Averaging(Ending):
    """Moves the anchor by the mean of all workers' moves, and each worker to it.

    Args:
        optimizer: `LocalOptimizer` whose rounds they are, its inner optimizer built.
        kept: variables that it keeps.
        variables: variables of the model.

    Attributes:
        anchor: variable of each variable of the model: what it was as the round began.
    """

    def __init__(self, optimizer: Any, kept: Kept, variables: Sequence[keras.Variable]):
        super().__init__(optimizer, kept, variables)
        self.anchor = moving.make_anchor(variables)

    def agreed(self, what: str) -> list[list[tf.Tensor]]:
        """Return the anchor, see `Ending`."""
        del what  # it is at hand
        copies = (Copies(self._strategy, a.value).local for a in self.anchor)
        return [[c.read_value() for c in replicas] for replicas in copies]

    def begin(self, rounds: Rounds) -> None:
        """Take the anchor, if a round begins; in replica context."""
        moving.cast_anchor(self.anchor, self._variables, rounds.begins())

    def consensus(self, rounds: Rounds) -> None:
        """Do the same as `end`, which leaves all workers alike."""
        self.end(rounds)

    def end(self, rounds: Rounds) -> None:
        """Exchange, and count the round; in replica context."""
        optimizer, made, number = self._optimizer, self._kept, rounds.number
        variables = self._variables
        moved = moving.return_to(self.anchor, variables)
        anew = self._inner.begin_anew_unless_finite(moved, made.natively)
        everything = range(len(moved))
        step = kinds.begin(moving.collect(optimizer, made, everything, moved, number))
        asks = number, optimizer.check_every, optimizer.on_divergence
        check = divergence.make_check(self._strategy, variables, *asks)
        outcome, asked = optimizer.communicator.run(step, check)
        rule = optimizer.outer_optimizer
        if self.drift:
            known = optimizer.communicator, optimizer.seed, number
            self.drift.measure(moved, *known)
            asked += drift.NUM_BYTES
        nonfinite = update(rule, outcome, variables, made.natively)
        self._inner.copy_weights(anew)
        counting.count_step(
            made.memory.counters,
            entries=outcome.entries,
            sent_bytes=outcome.sent_bytes + asked,
            dense_bytes=counting.dense_bytes(variables),
            nonfinite=nonfinite,
        )
        rounds.count_round(anew, alike=True)
