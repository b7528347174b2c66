"""Ring: TensorFlow's own collectives."""

import keras
import tensorflow as tf

from tf_dgc.collectives.algorithm import AlgorithmSteps, CollectiveAlgorithm, Cost, Rank
from tf_dgc.collectives.requests import AllGather, AllReduce


@keras.saving.register_keras_serializable(package="tf_dgc")
class Ring(CollectiveAlgorithm):
    """Sums and gathers with TensorFlow's own collectives; the default.

    On CPUs all-reduce is a ring reduce-scatter and a ring all-gather, and all-gather is
    a ring, too. On GPUs NCCL chooses.
    """

    name = "ring"
    reference = "Patarasuk and Yuan, JPDC 2009; TensorFlow's `RING`"

    def sum(self, values: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Request one all-reduce."""
        (total,) = yield [AllReduce(values)]
        return total

    def gather(self, words: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Request one all-gather."""
        (gathered,) = yield [AllGather(words)]
        return gathered

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of 2 (N - 1) rounds of `num_bytes / N` each."""
        rounds = 2 * (num_workers - 1)
        total = rounds * num_bytes / num_workers
        return Cost(rounds, total, total, total, launches=1)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost of N - 1 rounds of `num_bytes` each."""
        rounds = num_workers - 1
        total = rounds * num_bytes
        return Cost(rounds, total, total, total, launches=1)
