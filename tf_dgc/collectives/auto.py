"""Auto: the exchange that takes least time here, as the workers measure."""

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
    """Chooses when the optimizer is built, by a model of what each would take.

    The workers measure latency, bandwidth, and how fast they merge and decode entries,
    and all choose by the slowest of what they found. `optimizer.stats.exchange` says
    what was chosen. Without other processes it is the ring.

    Args:
        dense: whether everything may be sent, as float16, where that is faster; with
            `DGCOptimizer`, and `TopK` with error feedback.
    """

    name = "auto"
    reference = "the fastest of the others by `tf_dgc.collectives.predict`"

    def __init__(self, dense: bool = True):
        if not isinstance(dense, bool):
            raise ValueError(
                "`dense` must be True or False: whether everything may be sent where "
                f"that is faster. Received: dense={show(dense)}"
            )
        self.dense = dense

    def settle(self, hosts: Sequence[str]) -> CollectiveAlgorithm:
        """Return the ring, until something else is chosen."""
        return Ring()

    def candidates(
        self, num_workers: int, merges: bool, size: int = 0
    ) -> list[CollectiveAlgorithm]:
        """Return what is chosen from, the simplest first.

        Args:
            num_workers: number of workers, N.
            merges: whether entries may be merged on the way.
            size: entries of all tensors that are compressed; of regions there may be
                twice as many (`collectives/regions.py`).
        """
        found = [Ring(), Butterfly(), Tree(), Star(num_workers)]
        merging = [GTopK()] if 2 * size > 2**31 - 1 else [GTopK(), OkTopK()]
        return [*found, *merging] if merges else found

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"dense": self.dense}
