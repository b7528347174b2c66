"""Owning: entries go to the owners of regions, are summed there, and go to all.

Natively where the operations are there, else by TensorFlow's (`owning_operations.py`),
with the same bits.
"""

from typing import Any

import tensorflow as tf

from tf_dgc.codecs import header, value_types, wire
from tf_dgc.collectives import owning_operations
from tf_dgc.collectives.regions import Regions
from tf_dgc.collectives.requests import Left
from tf_dgc.collectives.space import Entries
from tf_dgc.ops import loader


def read(words: tf.Tensor, regions: Regions) -> Entries:
    """Return what this worker's words hold.

    Args:
        words: words of this worker, int32 `[w]`.
        regions: regions of all workers.
    """
    library = loader.native().library
    if library is None:
        return regions.space.read(words)
    form = regions.form
    positions, values = library.tf_dgc_read_places(
        words=words,
        counts=_counts(regions),
        A=regions.space.dtype,
        **_attributes(regions),
    )
    found = wire.values(words, *form)
    whole = [v for t, v in zip(form.layout, found, strict=True) if t.exempt]
    return Entries(positions, values, whole, words[header.FLAGS])


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
    library = loader.native().library
    if library is None:
        return owning_operations.split(own, starts, regions)
    rows, mine = library.tf_dgc_split_places(
        places=own.positions, values=own.values, **_arguments(starts, regions)
    )
    return tf.ensure_shape(rows, [regions.num_workers, _words(regions)]), mine


def collect(
    rows: tf.Tensor, starts: tf.Tensor, worker: int, regions: Regions
) -> tuple[tf.Tensor, Left]:
    """Return the sums of what the owner of a region has received.

    Summed in the order of workers; as many of each tensor as there is room for, chosen
    as in `split`. If a message was damaged, the sums say so to all, and nothing else.

    Args:
        rows: message from each worker, int32 `[N, w]`.
        starts: place where each region begins, int64 `[N]`.
        worker: index of this worker, who owns a region.
        regions: regions of all workers.

    Returns:
        Words for all, int32 `[w]`; and all sums.
    """
    library = loader.native().library
    if library is None:
        return owning_operations.collect(rows, starts, worker, regions)
    block, places, sums = library.tf_dgc_collect_places(
        rows=rows,
        worker=worker,
        A=regions.space.dtype,
        **_arguments(starts, regions),
    )
    return block, Left(places, sums)


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
        mine: places, int32 `[m]`, ascending but for some that are -1, as `split`
            returns them.
        others: sums of exempt tensors, and whether a gradient was not finite; its
            positions and values are not used.
        regions: regions of all workers.

    Returns:
        Words of the form, int32 `[w]`; and which of `mine` are in it, bool `[m]`.

    Raises:
        tf.errors.InvalidArgumentError: when run, for words that are refused, or were by
            an owner; on all workers alike.
    """
    library = loader.native().library
    if library is None:
        return owning_operations.unite(blocks, starts, mine, others, regions)
    exempt = [t for t in regions.form.layout if t.exempt]
    coded = [
        value_types.encode(total, tensor.value_type)
        for tensor, total in zip(exempt, others.whole, strict=True)
    ]
    return library.tf_dgc_unite_places(
        blocks=blocks,
        mine=mine,
        exempt=tf.concat([tf.zeros([0], tf.int32), *coded], axis=0),
        finite=tf.equal(others.flag, 0),
        A=regions.space.dtype,
        **_arguments(starts, regions),
    )


def _counts(regions: Regions) -> tf.Tensor:
    return tf.stack([tf.cast(k, tf.int32) for k in regions.form.counts])


def _attributes(regions: Regions) -> dict[str, Any]:
    layout = regions.form.layout
    return {
        "T": [t.dtype for t in layout],
        "sizes": [t.size for t in layout],
        "value_types": [t.wire_name for t in layout],
        "fingerprint": wire.fingerprint(layout),
    }


def _arguments(starts: tf.Tensor, regions: Regions) -> dict[str, Any]:
    layout = regions.message.layout
    return {
        "counts": _counts(regions),
        "starts": starts,
        "rooms": regions.rooms,
        "capacity": regions.capacity,
        "message_size": layout[0].size,
        "message_fingerprint": wire.fingerprint(layout),
        **_attributes(regions),
    }


def _words(regions: Regions) -> int | None:
    length = wire.sparse_words(*regions.message)
    return length if isinstance(length, int) else None
