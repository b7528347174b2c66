"""Overlapped: buckets of gradients are exchanged during the backward pass."""

import dataclasses
import enum
import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import show
from tf_dgc.collectives import registry
from tf_dgc.collectives.algorithm import (
    AlgorithmSteps,
    CollectiveAlgorithm,
    Cost,
    Rank,
)


@keras.saving.register_keras_serializable(package="tf_dgc")
class Overlapped(CollectiveAlgorithm):
    """Exchanges buckets of gradients during the backward pass, by any algorithm.

    A model of the links determines the buckets. A gradient that is not finite skips the
    step on all workers.

    >>> overlapped = tf_dgc.collectives.Overlapped("ring")
    >>> optimizer = tf_dgc.DGCOptimizer(sgd, collective=overlapped)

    Args:
        algorithm: a `CollectiveAlgorithm` between all workers, or its name.
        backward_seconds: duration of the backward pass in seconds, above 0; None to
            assume that of the exchange.

    Raises:
        ValueError: for other arguments.
    """

    name = "overlapped"
    reference = "none; buckets as in Li et al., PyTorch Distributed, VLDB 2020"

    def __init__(
        self,
        algorithm: CollectiveAlgorithm | str = "ring",
        backward_seconds: float | None = None,
    ):
        self.algorithm = registry.get(algorithm)
        if isinstance(self.algorithm, Overlapped) or (
            self.algorithm.is_neighbor_exchange
        ):
            raise ValueError(
                "`algorithm` must be an algorithm between all workers, such as "
                f'"ring". Received: algorithm={show(algorithm)}'
            )
        is_seconds = isinstance(backward_seconds, int | float) and (
            not isinstance(backward_seconds, bool) and 0 < backward_seconds < math.inf
        )
        if backward_seconds is not None and not is_seconds:
            raise ValueError(
                "`backward_seconds` must be the seconds that a backward pass takes, a "
                "finite number above 0, or None if unknown. Received: "
                f"backward_seconds={show(backward_seconds)}"
            )
        self.backward_seconds = backward_seconds

    def sum(self, values: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Sum as the algorithm does."""
        return self.algorithm.sum(values, rank)

    def gather(self, words: tf.Tensor, rank: Rank) -> AlgorithmSteps:
        """Gather as the algorithm does."""
        return self.algorithm.gather(words, rank)

    def cost_of_sum(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the algorithm's cost."""
        return self.algorithm.cost_of_sum(num_bytes, num_workers)

    def cost_of_gather(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the algorithm's cost."""
        return self.algorithm.cost_of_gather(num_bytes, num_workers)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "algorithm": keras.saving.serialize_keras_object(self.algorithm),
            "backward_seconds": self.backward_seconds,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Overlapped":
        """Create an algorithm from `get_config`'s dictionary."""
        algorithm = keras.saving.deserialize_keras_object(config["algorithm"])
        return cls(algorithm, config["backward_seconds"])

    def __repr__(self) -> str:
        return f"Overlapped({self.algorithm!r}, {self.backward_seconds!r})"


class OverlapMode(enum.Enum):
    """When buckets are exchanged during the backward pass."""

    NEVER = "never"
    IF_FASTER = "if faster"  # as the cost model predicts
    ALWAYS = "always"


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Whether buckets are exchanged during the backward pass.

    Attributes:
        mode: steps that overlap.
        backward_seconds: duration of the backward pass; None if unknown.
    """

    mode: OverlapMode = OverlapMode.NEVER
    backward_seconds: float | None = None
