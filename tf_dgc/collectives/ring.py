"""Ring: TensorFlow's own collectives."""

import keras
import tensorflow as tf

from tf_dgc.collectives.algorithm import AlgorithmSteps, CollectiveAlgorithm, Cost, Rank
from tf_dgc.collectives.requests import AllGather, AllReduce


@keras.saving.register_keras_serializable(package="tf_dgc")
class Ring(CollectiveAlgorithm):
    """Sums and gathers as TensorFlow does, around a ring; the default.

    On CPUs its all-reduce is a ring of reduce-scatter and all-gather, and its
    all-gather a ring too; on GPUs NCCL chooses.
    """

    name = "ring"
    reference = "Patarasuk and Yuan, JPDC 2009; TensorFlow's `RING`"

    def sum(self, values: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Ask for one all-reduce."""
        (total,) = yield [AllReduce(values)]
        return total

    def gather(self, words: tf.Tensor, place: Rank) -> AlgorithmSteps:
        """Ask for one all-gather."""
        (everyone,) = yield [AllGather(words)]
        return everyone

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of 2 (N - 1) rounds of an N-th each."""
        rounds = 2 * (num_workers - 1)
        each = rounds * num_bytes / num_workers
        return Cost(rounds, each, each, each, launches=1)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return that of N - 1 rounds of one worker's words each."""
        rounds = num_workers - 1
        each = rounds * num_bytes
        return Cost(rounds, each, each, each, launches=1)
