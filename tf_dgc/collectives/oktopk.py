"""Ok-Topk: entries are summed by the owners of regions, and the largest go to all."""

import abc
import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.collectives.algorithm import Cost, MergeResult, MergeSteps, Rank
from tf_dgc.collectives.butterfly import Butterfly
from tf_dgc.collectives.packing import AllReducePack
from tf_dgc.collectives.regions import (
    Regions,
    combine_blocks,
    read_entries,
    split_by_owner,
    sum_owned_entries,
)
from tf_dgc.collectives.requests import AllGather, AllToAll, BufferLayout, Remainder
from tf_dgc.collectives.ring import Ring
from tf_dgc.collectives.sparse_merge import FlatEntries

# --- What exchanges have in common in which entries are summed by owners of regions.


class OwnedRegionsAlgorithm(Ring):
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

    def merge(self, words: tf.Tensor, form: BufferLayout, place: Rank) -> MergeSteps:
        """Agree on regions, send entries to their owners, gather the largest sums."""
        if all(t.uncompressed for t in form.layout):
            # Such a step is dense: where that is decided at run time, this is traced.
            return MergeResult(words, tf.zeros([0], tf.bool), _no_sums(self.keeps_sums))
        regions = Regions(form, place.num_workers, self.slack)
        own = read_entries(words, regions)
        offsets, others = yield from _sum(regions.offsets(own.positions), own, place)
        starts = regions.starts(offsets)
        rows, mine = split_by_owner(own, starts, regions)
        (received,) = yield [AllToAll(rows)]
        block, sums = sum_owned_entries(received, starts, place.worker, regions)
        (blocks,) = yield [AllGather(block)]
        asked = sums.places if self.keeps_sums else mine
        words, found = combine_blocks(blocks, starts, asked, others, regions)
        return self._settle(words, found, mine, sums)

    @abc.abstractmethod
    def _settle(
        self, words: tf.Tensor, found: tf.Tensor, mine: tf.Tensor, sums: Remainder
    ) -> MergeResult:
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


def _no_sums(keeps_sums: bool) -> Remainder | None:
    return Remainder(tf.zeros([0], tf.int32), tf.zeros([0])) if keeps_sums else None


def _sum(offsets: tf.Tensor, own: FlatEntries, place: Rank) -> Any:
    """Return the sums of offsets, and of all of a worker's that is no entry."""
    values = [offsets, *own.whole]
    finite = tf.equal(own.flag, 0)
    packs = []
    for dtype in dict.fromkeys(v.dtype for v in values):
        parts = {i: v for i, v in enumerate(values) if v.dtype == dtype}
        packs.append(AllReducePack(parts, finite))
    sums: dict[int, tf.Tensor] = {}
    for pack in packs:
        total = yield from Butterfly().sum(pack.message.values, place)
        found, nonfinite = pack.unpack(total)
        sums.update(found)
    flag = tf.minimum(nonfinite, 1)
    whole = [sums[i] for i in range(1, len(values))]
    return sums[0], own._replace(whole=whole, flag=flag)


@keras.saving.register_keras_serializable(package="tf_dgc")
class OkTopK(OwnedRegionsAlgorithm):
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
        self, words: tf.Tensor, found: tf.Tensor, mine: tf.Tensor, sums: Remainder
    ) -> MergeResult:
        return MergeResult(words, found)


# --- Two-way: owners of regions keep back what they do not send on.


@keras.saving.register_keras_serializable(package="tf_dgc")
class TwoWay(OwnedRegionsAlgorithm):
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
        self, words: tf.Tensor, found: tf.Tensor, mine: tf.Tensor, sums: Remainder
    ) -> MergeResult:
        rest = tf.logical_not(found)
        left = Remainder(*(tf.boolean_mask(part, rest) for part in sums))
        return MergeResult(words, mine >= 0, left)
