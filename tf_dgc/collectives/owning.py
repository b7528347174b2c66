"""Owning: entries go to the owners of regions, are summed there, and go to all.

Natively where the operations are there, else by TensorFlow's (`owning_operations.py`),
with the same bits.
"""

import tensorflow as tf

from tf_dgc.collectives import owning_operations
from tf_dgc.collectives.regions import Regions
from tf_dgc.collectives.space import Entries


def read(words: tf.Tensor, regions: Regions) -> Entries:
    """Return what this worker's words hold.

    Args:
        words: words of this worker, int32 `[w]`.
        regions: regions of all workers.
    """
    return regions.space.read(words)


def split(
    own: Entries, starts: tf.Tensor, regions: Regions
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return what is for the owner of each region.

    Of a tensor with more entries than there is room for, the largest by magnitude, and
    of equal ones those that come first.

    Args:
        own: entries of this worker.
        starts: place where each region begins, int64 `[N]`.
        regions: regions of all workers.

    Returns:
        A message for each, int32 `[N, w]`; and the place of each entry that is in one,
        int32 `[K]`, -1 where there was no room.
    """
    return owning_operations.split(own, starts, regions)


def collect(
    rows: tf.Tensor, starts: tf.Tensor, worker: int, regions: Regions
) -> tf.Tensor:
    """Return the sums of what the owner of a region has received.

    Summed in the order of workers; as many of each tensor as there is room for, chosen
    as in `split`. If a message was damaged, the sums say so to all, and nothing else.

    Args:
        rows: message from each worker, int32 `[N, w]`.
        starts: place where each region begins, int64 `[N]`.
        worker: index of this worker, who owns a region.
        regions: regions of all workers.

    Returns:
        Words for all, int32 `[w]`.
    """
    return owning_operations.collect(rows, starts, worker, regions)


def unite(
    blocks: tf.Tensor,
    starts: tf.Tensor,
    mine: tf.Tensor,
    others: Entries,
    regions: Regions,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the largest of all regions' sums, as many of each tensor as form has.

    Chosen as in `split`. Where there are fewer, zeros stand at the first places that
    are free.

    Args:
        blocks: sums of all owners, int32 `[N, w]`.
        starts: place where each region begins, int64 `[N]`.
        mine: place of each entry that was sent, as `split` returns it.
        others: sums of exempt tensors, and whether a gradient was not finite; its
            positions and values are not used.
        regions: regions of all workers.

    Returns:
        Words of the form, int32 `[w]`; and which of this worker's entries are in it,
        bool `[K]`.

    Raises:
        tf.errors.InvalidArgumentError: when run, for words that are refused, or were by
            an owner; on all workers alike.
    """
    return owning_operations.unite(blocks, starts, mine, others, regions)
