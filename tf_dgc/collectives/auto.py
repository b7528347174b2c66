"""Auto: the fastest algorithm, by the workers' own measurements."""

from collections.abc import Sequence
from typing import Any

import keras

from tf_dgc.arguments import show
from tf_dgc.collectives.algorithm import CollectiveAlgorithm
from tf_dgc.collectives.butterfly import Butterfly
from tf_dgc.collectives.gtopk import GTopK
from tf_dgc.collectives.oktopk import OkTopK
from tf_dgc.collectives.ring import Ring
from tf_dgc.collectives.star import Star
from tf_dgc.collectives.tree import Tree


@keras.saving.register_keras_serializable(package="tf_dgc")
class Auto(Ring):
    """Chooses the algorithm of least predicted time when the optimizer is built.

    The workers measure latency, bandwidth, and how fast they merge and decode entries;
    the slowest measurement of all decides. `optimizer.stats.collective` has the choice.
    Without other processes it is the ring.

    Args:
        dense: whether everything may be sent, as float16, where that is faster; with
            `DGCOptimizer`, and `TopK` with error feedback.
        overlap: whether buckets of gradients may be exchanged during the backward pass
            (see `Overlapped`), where that is predicted to be faster.
    """

    name = "auto"
    reference = "the fastest of the others, by `predict_seconds`"

    def __init__(self, dense: bool = True, overlap: bool = True):
        if not isinstance(dense, bool):
            raise ValueError(
                "`dense` must be True or False: whether everything may be sent where "
                f"that is faster. Received: dense={show(dense)}"
            )
        if not isinstance(overlap, bool):
            raise ValueError(
                "`overlap` must be True or False: whether exchanges may overlap with "
                f"the backward pass. Received: overlap={show(overlap)}"
            )
        self.dense = dense
        self.overlap = overlap

    def resolve(self, hosts: Sequence[str]) -> CollectiveAlgorithm:
        """Return the ring, which is used until another algorithm is chosen."""
        return Ring()

    def candidates(
        self, num_workers: int, merges: bool, size: int = 0
    ) -> list[CollectiveAlgorithm]:
        """Return the algorithms to choose from, simplest first.

        Args:
            num_workers: number of workers, N.
            merges: whether sparse entries may be merged on the way.
            size: entries of all compressed tensors.
        """
        algorithms = [Ring(), Butterfly(), Tree(), Star(num_workers)]
        if not merges:
            return algorithms
        # The positions of OkTopK's messages may be up to twice as many as entries.
        fits_oktopk = 2 * size <= 2**31 - 1
        return [*algorithms, GTopK(), *([OkTopK()] if fits_oktopk else [])]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"dense": self.dense, "overlap": self.overlap}
