"""Bucketing: which tensors of a step are exchanged together while it goes on."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

from tf_dgc.codecs.tensor import Tensor
from tf_dgc.exchanges import Asked, Links, overlap
from tf_dgc.exchanges.overlap import Transfer
from tf_dgc.optimizers.choosing import Chosen, what_is_asked

# Where nothing is measured, as of the replicas of one process: links of 1 Gbit/s.
_ASSUMED = Links(1e-3, 1e-4, 8e-9, 5e-9, 4e-9, 8e-10)
_WORTH_IT = 0.9  # of the time without


def split(
    chosen: Chosen,
    wanted: bool | float | None,
    tensors: Sequence[Tensor],
    num_kept: int,
    num_workers: int,
) -> Chosen:
    """Return what was chosen with the buckets of its steps, if they are to overlap.

    The backward pass is taken to finish tensors from the last to the first, and to take
    as long for each entry.

    Args:
        chosen: method and exchange.
        wanted: choice of the user: whether to overlap, or the seconds that a backward
            pass takes; None if it is to be where the model says that it pays.
        tensors: descriptions of all tensors.
        num_kept: number of variables of a tensor's size that a worker keeps of each.
        num_workers: number of workers, N.
    """
    if wanted is False or num_workers == 1 or (wanted is None and not chosen.links):
        return chosen
    order = list(reversed(range(len(tensors))))
    links = chosen.links or _ASSUMED
    costs = _costs(chosen, [tensors[i] for i in order], num_workers, links)
    # As long as the exchange, where it is not known.
    backward = costs.alone if wanted is None or wanted is True else float(wanted)
    sizes = [tensors[i].size for i in order]
    ready = [backward * done / sum(sizes) for done in accumulate(sizes)]
    places = overlap.merge(ready, costs)
    if wanted is None:
        # What is kept is copied, and sums are in memory before they are applied.
        passes = (num_kept + 1) * sum(sizes) * links.rounding
        taken = overlap.finish(ready, places, costs) + passes
        if taken > _WORTH_IT * (backward + costs.alone):
            return chosen
    buckets = [[order[place] for place in sorted(some)[::-1]] for some in places]
    if len(buckets) < 2:
        return chosen
    name = f"{chosen.name}, {len(buckets)} buckets"
    return dataclasses.replace(chosen, name=name, buckets=buckets)


def _costs(
    chosen: Chosen, tensors: Sequence[Tensor], num_workers: int, links: Links
) -> Transfer:
    """Return what exchanging takes; of unknown payloads as if all were sent."""

    def asked(some: Sequence[Tensor]) -> list[Asked]:
        found = what_is_asked(chosen.compressor, some, num_workers)
        return found or [Asked("sum", sum(t.size * t.dtype.size for t in some))]

    return overlap.transfer(
        chosen.exchange,
        [asked([tensor]) for tensor in tensors],
        asked(tensors),
        num_workers,
        links,
    )
