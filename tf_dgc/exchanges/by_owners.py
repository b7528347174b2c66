"""What exchanges have in common in which entries are summed by owners of regions."""

import abc
import math
from typing import Any

import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.collectives import owning
from tf_dgc.collectives.packs import SumPack
from tf_dgc.collectives.regions import Regions
from tf_dgc.collectives.requests import Form, Gather, Left, Spread
from tf_dgc.collectives.space import Entries
from tf_dgc.exchanges.base import Cost, Merged, MergeRounds, Place
from tf_dgc.exchanges.butterfly import Butterfly
from tf_dgc.exchanges.ring import Ring


class ByOwners(Ring):
    """Sums sparse entries by their owners, and gathers the k largest sums.

    The positions are split into a region for each worker, and everyone sends its
    entries to the owners of their regions (all-to-all); an owner sums what it receives,
    and the largest sums are gathered. What a worker sends is about 2 (N - 1)/N of its
    entries, for any N.

    Regions begin where the entries of all workers, on the average, are split evenly:
    the mean of workers' quantiles, which are summed first, with exempt tensors, along a
    butterfly. A message has a fixed size, with some room beyond an even split. Owners
    send as many of their largest sums as there is room for, and all workers keep the k
    largest of these: by magnitude, for each tensor, without a threshold to agree on.

    Values travel as wide as they are accumulated. What is no buffer of entries goes
    around TensorFlow's ring.

    Args:
        slack: share of room beyond an even split, 0 or more.
    """

    drops_entries = True

    def __init__(self, slack: float = 0.25):
        means = ", the share of room beyond an even split"
        self.slack = check_number("slack", slack, "[0, inf)", means)

    def merge(self, words: tf.Tensor, form: Form, place: Place) -> MergeRounds:
        """Agree on regions, send entries to their owners, gather the largest sums."""
        if all(t.exempt for t in form.layout):
            # Such a step is dense: where that is decided at run time, this is traced.
            return Merged(words, tf.zeros([0], tf.bool), _no_sums(self.keeps_sums))
        regions = Regions(form, place.num_workers, self.slack)
        own = owning.read(words, regions)
        offsets, others = yield from _sum(regions.offsets(own.positions), own, place)
        starts = regions.starts(offsets)
        rows, mine = owning.split(own, starts, regions)
        (received,) = yield [Spread(rows)]
        block, sums = owning.collect(received, starts, place.worker, regions)
        (blocks,) = yield [Gather(block)]
        asked = sums.places if self.keeps_sums else mine
        words, found = owning.unite(blocks, starts, asked, others, regions)
        return self._settle(words, found, mine, sums)

    @abc.abstractmethod
    def _settle(
        self, words: tf.Tensor, found: tf.Tensor, mine: tf.Tensor, sums: Left
    ) -> Merged:
        """Return what becomes of the entries that are not in the result.

        Args:
            words: result, int32 `[w]`.
            found: whether each of the sums is in it, if the exchange keeps sums, else
                whether each of `mine` is, bool.
            mine: place of each entry of this worker, int32 `[K]`, -1 where there was no
                room for it.
            sums: all sums of this worker's region.
        """

    def cost_of_merge(self, num_bytes: float, num_workers: int) -> Cost:
        """Return it for about 42 bits per entry, and no exempt tensors.

        A position takes log2 N bits more than in the payload: of N times as many.
        """
        others = num_workers - 1
        longer = 1 + math.log2(num_workers) / 42
        agreeing = Butterfly().cost_of_sum(0, num_workers).rounds
        message = (1 + self.slack) * longer * num_bytes
        each = 2 * others / num_workers * message
        # It reads its own entries, those for its region, and everyone's sums.
        merged = num_bytes + 2 * message
        launches = agreeing + 2
        return Cost(agreeing + 1 + others, each, each, each, launches, merged)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"slack": self.slack}


def _no_sums(keeps_sums: bool) -> Left | None:
    return Left(tf.zeros([0], tf.int32), tf.zeros([0])) if keeps_sums else None


def _sum(offsets: tf.Tensor, own: Entries, place: Place) -> Any:
    """Return the sums of offsets, and of all of a worker's that is no entry."""
    values = [offsets, *own.whole]
    finite = tf.equal(own.flag, 0)
    packs = []
    for dtype in dict.fromkeys(v.dtype for v in values):
        parts = {i: v for i, v in enumerate(values) if v.dtype == dtype}
        packs.append(SumPack(parts, finite))
    sums: dict[int, tf.Tensor] = {}
    for pack in packs:
        total = yield from Butterfly().sum(pack.message.values, place)
        found, nonfinite = pack.unpack(total)
        sums.update(found)
    flag = tf.minimum(nonfinite, 1)
    whole = [sums[i] for i in range(1, len(values))]
    return sums[0], own._replace(whole=whole, flag=flag)
