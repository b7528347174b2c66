"""Two-way: owners of regions keep back what they do not send on."""

import keras
import tensorflow as tf

from tf_dgc.collectives.requests import Left
from tf_dgc.exchanges.base import Merged
from tf_dgc.exchanges.by_owners import ByOwners


@keras.saving.register_keras_serializable(package="tf_dgc")
class TwoWay(ByOwners):
    """Sums sparse entries by their owners, who compress the sums again.

    Tang et al., algorithm 1, with a server's work shared by all workers (`ByOwners`):
    both what is sent to an owner and what it sends to all is cut to the largest, with
    error feedback at each end. An entry counts as sent if there was room for it in the
    message to its owner.

    The owner's error is added to its residual, at these positions: it goes out as soon
    as it is among the largest of what that worker has. So it is state like any other,
    which checkpoints hold and another number of workers shares out, and a region may
    begin elsewhere in the next step.

    Args:
        slack: share of room beyond an even split, 0 or more.
    """

    name = "twoway"
    reference = "Tang et al., DoubleSqueeze, ICML 2019, algorithm 1"
    keeps_sums = True

    def _settle(
        self, words: tf.Tensor, found: tf.Tensor, mine: tf.Tensor, sums: Left
    ) -> Merged:
        rest = tf.logical_not(found)
        left = Left(*(tf.boolean_mask(part, rest) for part in sums))
        return Merged(words, mine >= 0, left)
