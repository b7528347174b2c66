"""Bucketing: which tensors of a step are exchanged together while it goes on."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate

from tf_dgc.arguments import show
from tf_dgc.codecs.tensor import Tensor
from tf_dgc.compressors import Compressor
from tf_dgc.exchanges import Asked, Links, overlap
from tf_dgc.exchanges.overlap import Transfer
from tf_dgc.inner.taken import TakeOver
from tf_dgc.optimizers.choosing import Chosen, what_is_asked

# Where nothing is measured, as of the replicas of one process: links of 1 Gbit/s.
_ASSUMED = Links(1e-3, 1e-4, 8e-9, 5e-9, 4e-9, 8e-10)
_WORTH_IT = 0.9  # of the time without
# Where the links are found to be busy to the end, all that is left goes together, which
# costs much if they are not, and saves little if they are.
_LONGER = 1.25


def check(
    overlap: bool | float | None,
    compressor: Compressor,
    took: TakeOver,
    track_staleness: bool,
) -> None:
    """Raise `ValueError` for an overlap that cannot be.

    Args:
        overlap: choice of the user.
        compressor: method of the optimizer.
        took: settings of the inner optimizer that are applied in its place.
        track_staleness: whether it is remembered when entries were sent.
    """
    if not (overlap is None or isinstance(overlap, bool) or _is_time(overlap)):
        raise ValueError(
            '`overlap` must be True, False, None (where `exchange="auto"` finds that '
            "it pays), or the seconds that a backward pass takes, a finite number "
            f"above 0. Received: overlap={show(overlap)}"
        )
    found = hindrance(compressor, took, track_staleness)
    if overlap and found:
        raise ValueError(
            "With `overlap` a tensor is exchanged while the gradients of others are "
            f"not there yet, and {found}. Received: overlap={show(overlap)}"
        )


def hindrance(
    compressor: Compressor, took: TakeOver, track_staleness: bool
) -> str | None:
    """Return why steps cannot overlap, and what to do; None if they can.

    Arguments are those of `check`.
    """
    if compressor.together:
        return f"{compressor!r} sees all of them as one. Use another method"
    if took.clipping["global_clipnorm"]:
        return "`global_clipnorm` is about the norm of all. Use `clipnorm`"
    if took.adam:
        return "the Adam correction takes a sample of all. Use `adam_correction=False`"
    if took.calls > 1:
        return (
            "with `gradient_accumulation_steps` the last of several calls takes the "
            "step, when all are there. Leave one of both out"
        )
    if track_staleness:
        return "`track_staleness` counts whole steps. Leave it out"
    return None


def _is_time(overlap: object) -> bool:
    return isinstance(overlap, int | float) and 0 < overlap < math.inf


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
    places = overlap.merge([_LONGER * seconds for seconds in ready], costs)
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
