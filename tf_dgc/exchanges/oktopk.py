"""Ok-Topk: entries are summed by the owners of regions, and the largest go to all."""

import keras
import tensorflow as tf

from tf_dgc.collectives.requests import Left
from tf_dgc.exchanges.base import Merged
from tf_dgc.exchanges.by_owners import ByOwners


@keras.saving.register_keras_serializable(package="tf_dgc")
class OkTopK(ByOwners):
    """Sums sparse entries by their owners, and gathers the k largest sums.

    Li and Hoefler, section 3; see `ByOwners`. (The paper keeps regions for 64 steps;
    here they are agreed on by N - 1 numbers, and always those of this step.)

    An entry counts as sent if there was room for it, and the sum at its position is in
    the result; else it goes back to its worker's residual.

    Args:
        slack: share of room beyond an even split, 0 or more.
    """

    name = "oktopk"
    reference = "Li and Hoefler, PPoPP 2022, algorithm 1"

    def _settle(
        self, words: tf.Tensor, found: tf.Tensor, mine: tf.Tensor, sums: Left
    ) -> Merged:
        return Merged(words, found)
