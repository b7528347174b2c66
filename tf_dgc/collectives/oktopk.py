"""Ok-Topk: region owners sum entries, and send the largest sums to all workers."""

import math
from collections.abc import Generator
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
from tf_dgc.collectives.requests import (
    AllGather,
    AllToAll,
    BufferLayout,
    Primitive,
    Remainder,
)
from tf_dgc.collectives.ring import Ring
from tf_dgc.collectives.sparse_merge import FlatEntries


class OwnedRegionsAlgorithm(Ring):
    """Base class: region owners sum entries, then the k largest sums are gathered.

    1. The positions are split into one region per worker, its owner.
    2. Each worker sends its entries to the owners of their regions (all-to-all), about
       2 (N - 1)/N of its entries for any N.
    3. Each owner sums the entries it receives.
    4. The largest sums of all regions are gathered, and all workers keep the k largest
       of each tensor, by magnitude.

    Regions split the entries of the average worker evenly: they begin at the mean of
    the workers' quantiles, which a butterfly sums first, together with uncompressed
    tensors. Messages have a fixed size, with some room beyond an even split; owners
    send as many of their largest sums as there is room for.

    Values are sent in the dtype in which they are accumulated. Everything except sparse
    buffers uses TensorFlow's collectives.

    Args:
        slack: share of room beyond an even split, 0 or more.
    """

    drops_entries = True

    def __init__(self, slack: float = 0.25):
        meaning = ", the share of room beyond an even split"
        self.slack = check_number("slack", slack, "[0, inf)", meaning)

    def merge(self, words: tf.Tensor, layout: BufferLayout, rank: Rank) -> MergeSteps:
        """Find regions, send entries to their owners, gather the largest sums."""
        if all(t.uncompressed for t in layout.tensors):
            # Traced, but never run: a step without compressed tensors is dense.
            no_sums = Remainder(tf.zeros([0], tf.int32), tf.zeros([0]))
            remainder = no_sums if self.keeps_sums else None
            return MergeResult(words, tf.zeros([0], tf.bool), remainder)
        regions = Regions(layout, rank.num_workers, self.slack)
        entries = read_entries(words, regions)
        offsets, summed = yield from _sum_uncompressed(
            regions.offsets(entries.positions), entries, rank
        )
        starts = regions.starts(offsets)
        rows, sent = split_by_owner(entries, starts, regions)
        (received,) = yield [AllToAll(rows)]
        block, sums = sum_owned_entries(received, starts, rank.worker, regions)
        (blocks,) = yield [AllGather(block)]
        queries = sums.positions if self.keeps_sums else sent
        words, is_in_result = combine_blocks(blocks, starts, queries, summed, regions)
        if not self.keeps_sums:
            return MergeResult(words, is_in_result)
        dropped = tf.logical_not(is_in_result)
        remainder = Remainder(
            tf.boolean_mask(sums.positions, dropped),
            tf.boolean_mask(sums.values, dropped),
        )
        return MergeResult(words, sent >= 0, remainder)

    def cost_of_merge(self, num_bytes: float, num_workers: int) -> Cost:
        """Return the cost for about 42 bits per entry, without uncompressed tensors.

        A position takes log2 N bits more than in the payload, as there are N times as
        many.
        """
        others = num_workers - 1
        longer = 1 + math.log2(num_workers) / 42
        butterfly_rounds = Butterfly().cost_of_sum(0, num_workers).rounds
        message = (1 + self.slack) * longer * num_bytes
        total = 2 * others / num_workers * message
        # A worker reads its own entries, those for its region, and all regions' sums.
        merged = num_bytes + 2 * message
        rounds = butterfly_rounds + 1 + others
        return Cost(rounds, total, total, total, butterfly_rounds + 2, merged)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"slack": self.slack}


def _sum_uncompressed(
    offsets: tf.Tensor, entries: FlatEntries, rank: Rank
) -> Generator[list[Primitive], list[tf.Tensor], tuple[tf.Tensor, FlatEntries]]:
    """Sum region offsets, uncompressed tensors and the flag over workers."""
    values = [offsets, *entries.uncompressed]
    finite = tf.equal(entries.nonfinite, 0)
    packs = []
    for dtype in dict.fromkeys(v.dtype for v in values):
        of_dtype = {i: v for i, v in enumerate(values) if v.dtype == dtype}
        packs.append(AllReducePack(of_dtype, finite))
    sums: dict[int, tf.Tensor] = {}
    for pack in packs:
        total = yield from Butterfly().sum(pack.request.values, rank)
        unpacked, nonfinite = pack.unpack(total)
        sums.update(unpacked)
    uncompressed = [sums[i] for i in range(1, len(values))]
    flag = tf.minimum(nonfinite, 1)
    return sums[0], entries._replace(uncompressed=uncompressed, nonfinite=flag)


@keras.saving.register_keras_serializable(package="tf_dgc")
class OkTopK(OwnedRegionsAlgorithm):
    """Sums sparse entries at region owners, and gathers the k largest sums.

    Li and Hoefler, section 3; see `OwnedRegionsAlgorithm`. (The paper keeps regions for
    64 steps; here each step has its own, which cost N - 1 numbers.)

    An entry counts as sent if its message had room for it and the sum at its position
    is in the result; otherwise it returns to its worker's residual.

    Args:
        slack: share of room beyond an even split, 0 or more.
    """

    name = "oktopk"
    reference = "Li and Hoefler, PPoPP 2022, algorithm 1"


@keras.saving.register_keras_serializable(package="tf_dgc")
class TwoWay(OwnedRegionsAlgorithm):
    """Sums sparse entries at region owners, which compress the sums again.

    Tang et al., algorithm 1, with the server's work shared by all workers as in
    `OwnedRegionsAlgorithm`: both the message to an owner and its message to all are cut
    to the largest entries, with error feedback at each end. An entry counts as sent if
    the message to its owner had room for it.

    An owner adds its error to its own residual at these positions, from where it is
    sent as soon as it is among that worker's largest entries. So it is ordinary state:
    checkpoints save it, a different number of workers divides it, and regions may
    change in the next step.

    Args:
        slack: share of room beyond an even split, 0 or more.
    """

    name = "twoway"
    reference = "Tang et al., DoubleSqueeze, ICML 2019, algorithm 1"
    keeps_sums = True
