"""Regions: the entries of all tensors are split among workers, by position."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_dgc import native_library
from tf_dgc.codecs import buffer, value_types
from tf_dgc.codecs.buffer import SelectedEntries
from tf_dgc.codecs.checks import BufferCheck, all_hold, require
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import BufferLayout, Remainder
from tf_dgc.collectives.sparse_merge import FlatEntries, FlatIndexSpace, largest_entries


class _Split(NamedTuple):
    """How the K entries of a worker are split, NumPy's or tensors.

    Attributes:
        ranks: number of the first entry of each region, int64 `[N]`.
        rooms: entries of each tensor that there is room for, int32 `[N, tensors]`.
        capacity: entries that there is room for in any region, scalar int32.
    """

    ranks: Any
    rooms: Any
    capacity: Any


class Regions:
    """Where each worker's region is, and what travels to its owner and from it.

    All tensors that are not exempt stand one behind the other, and a worker's K entries
    are split evenly in this order: region i of N begins with number i K / N. In which
    tensor that is, follows from the form; where in it, from all workers' positions.

    A message, and what an owner makes of those that it has received, has room for
    `1 + slack` times the entries that an even split gives, of each tensor in the
    region. They are buffers like others, of one tensor, the whole space; in what is
    left of the room stand positions behind it, of zeros.

    Args:
        form: form of a worker's words, with a tensor that is not exempt.
        num_workers: number of workers, N.
        slack: share of room beyond an even split.

    Attributes:
        form: form of a worker's words.
        space: space of all places.
        size: number of places.
        num_workers: number of workers, N.
        rooms: entries of each tensor that there is room for, int32 `[N, tensors]`.
        capacity: entries of a message, an int or a scalar int32 tensor.
        message: form of messages, and of what owners send.

    Raises:
        ValueError: if the space is too large for the positions on the wire.
    """

    def __init__(self, form: BufferLayout, num_workers: int, slack: float):
        self.form = form
        self.space = FlatIndexSpace(form)
        self.size = sum(self.space.sizes)
        self.num_workers = num_workers
        if all(isinstance(k, int) for k in form.counts):
            with tf.init_scope():  # numbers, not tensors of the graph
                split = _split(FlatIndexSpace(form).counts, num_workers, slack)
            self._ranks, self.rooms, capacity = (np.array(part) for part in split)
            self.capacity = behind = int(capacity)
        else:
            split = _split(self.space.counts, num_workers, slack)
            self._ranks, self.rooms, self.capacity = split
            behind = self.size
        self.message = _form_of_messages(self, behind)

    def offsets(self, positions: tf.Tensor) -> tf.Tensor:
        """Return where one worker would let regions begin.

        Args:
            positions: places of its entries, int64 `[K]`.

        Returns:
            From the beginning of the tensor, of all regions but the first, float32
            `[N - 1]`; 0 for those that begin with the first entry of a tensor.
        """
        tensors, firsts = self._tensors_of_ranks()
        places = tf.gather(positions, self._ranks[1:]) - tf.gather(
            self.space.bases, tensors
        )
        return tf.cast(tf.where(firsts, tf.zeros_like(places), places), tf.float32)

    def starts(self, offsets: tf.Tensor) -> tf.Tensor:
        """Return where regions begin, ascending, int64 `[N]`.

        Args:
            offsets: sum over workers of `offsets`, float32 `[N - 1]`.
        """
        tensors, _ = self._tensors_of_ranks()
        mean = tf.cast(tf.floor(offsets / self.num_workers), tf.int64)
        last = tf.gather(tf.constant(self.space.sizes, tf.int64), tensors) - 1
        places = tf.clip_by_value(mean, tf.zeros_like(last), last)
        places = tf.sort(places + tf.gather(self.space.bases, tensors))
        starts = tf.concat([tf.zeros([1], tf.int64), places], axis=0)
        # Regions that nothing is left for are where the next one begins.
        return tf.gather(starts, tf.searchsorted(self._ranks, self._ranks))

    def owners(self, starts: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Return in which region each place is, int32."""
        return tf.searchsorted(starts, positions, side="right") - 1

    def _tensors_of_ranks(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return in which tensor regions begin, and whether with its first entry."""
        begins = tf.cumsum(self.space.counts, exclusive=True)
        ranks = self._ranks[1:]
        tensors = tf.searchsorted(begins, ranks, side="right") - 1
        return tensors, tf.equal(tf.gather(begins, tensors), ranks)


def _split(counts: tf.Tensor, num_workers: int, slack: float) -> _Split:
    """Split evenly as many entries of each tensor, int64 `[tensors]`."""
    ends = tf.cumsum(counts)
    ranks = tf.range(num_workers + 1, dtype=tf.int64) * ends[-1] // num_workers
    low = tf.maximum(ranks[:-1, tf.newaxis], ends - counts)
    high = tf.minimum(ranks[1:, tf.newaxis], ends)
    shares = tf.cast(tf.maximum(high - low, 0), tf.float64)
    wider = tf.math.ceil(shares * (1 + slack))  # perhaps more than any int holds
    rooms = tf.cast(tf.minimum(wider, tf.cast(counts, tf.float64)), tf.int32)
    capacity = tf.reduce_max(tf.reduce_sum(rooms, axis=1))
    return _Split(ranks[:-1], rooms, capacity)


def _form_of_messages(regions: Regions, behind: int) -> BufferLayout:
    """Return it, of positions in the space, and so many behind it."""
    size = regions.size + behind
    if size > 2**31 - 1:
        raise ValueError(
            "Regions have at most 2**31 - 1 places, some of which are for what is left "
            "over of the room. Use another `exchange`, as `gtopk`. Received: "
            f"{regions.size} entries in all tensors"
        )
    tensor = TensorSpec("entries of a region", (size,), regions.space.dtype, False)
    return BufferLayout([tensor], [regions.capacity])


# --- What `owning` does, by TensorFlow's operations: the definition.


def split_by_owner_with_tensorflow(
    own: FlatEntries, starts: tf.Tensor, regions: Regions
) -> tuple[tf.Tensor, tf.Tensor]:
    """Do what `owning.split` does."""
    owners = regions.owners(starts, own.positions)
    groups = owners * len(regions.space.sizes) + regions.space.tensors_of(own.positions)
    kept = largest_entries(groups, tf.abs(own.values), tf.reshape(regions.rooms, [-1]))
    owners, places = tf.gather(owners, kept), tf.gather(own.positions, kept)
    slots = tf.range(tf.size(kept)) - tf.searchsorted(owners, owners)
    where = tf.stack([owners, slots], axis=1)
    table = [regions.num_workers, regions.capacity]
    positions = tf.broadcast_to(_behind(regions), table)
    positions = tf.tensor_scatter_nd_update(positions, where, places)
    values = tf.scatter_nd(where, tf.gather(own.values, kept), table)
    rows = [
        _message(p, v, tf.constant(True), regions)
        for p, v in zip(
            tf.unstack(positions, regions.num_workers),
            tf.unstack(values, regions.num_workers),
            strict=True,
        )
    ]
    nowhere = tf.fill(tf.shape(own.positions), tf.constant(-1, tf.int64))
    mine = tf.tensor_scatter_nd_update(nowhere, kept[:, tf.newaxis], places)
    return tf.stack(rows), tf.cast(mine, tf.int32)


def sum_owned_entries_with_tensorflow(
    rows: tf.Tensor, starts: tf.Tensor, worker: int, regions: Regions
) -> tuple[tf.Tensor, Remainder]:
    """Do what `owning.collect` does."""
    flags, ((positions, values),), checks = buffer.parse_buffers(rows, *regions.message)
    positions = tf.cast(positions, tf.int64)
    owners = tf.fill([regions.num_workers], worker)
    checks += [_check_places(positions, starts, owners, regions)]
    fine = all_hold([*checks, BufferCheck("flags", flags, 0)])
    positions = tf.where(fine, positions, _behind(regions))
    real = positions < regions.size
    places = tf.boolean_mask(positions, real)
    distinct = tf.sort(places)
    distinct = tf.boolean_mask(distinct, _is_first(distinct))
    sums = tf.math.unsorted_segment_sum(
        tf.boolean_mask(values, real),
        tf.searchsorted(distinct, places),
        tf.size(distinct),
    )
    tensors = regions.space.tensors_of(distinct)
    kept = largest_entries(tensors, tf.abs(sums), regions.rooms[worker])
    left = regions.capacity - tf.size(kept)
    positions = tf.concat([tf.gather(distinct, kept), _behind(regions)[:left]], axis=0)
    largest_sums = tf.pad(tf.gather(sums, kept), [[0, left]])
    block = _message(positions, largest_sums, fine, regions)
    return block, Remainder(tf.cast(distinct, tf.int32), sums)


def combine_blocks_with_tensorflow(
    blocks: tf.Tensor,
    starts: tf.Tensor,
    mine: tf.Tensor,
    others: FlatEntries,
    regions: Regions,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Do what `owning.unite` does."""
    flags, ((positions, values),) = buffer.read_buffers(blocks, *regions.message)
    positions = tf.cast(positions, tf.int64)
    owners = tf.range(regions.num_workers)
    checks = [
        BufferCheck("damaged messages that it has received", flags, 0),
        _check_places(positions, starts, owners, regions),
    ]
    positions, values = require(checks, (positions, values))
    real = positions < regions.size
    places, values = tf.boolean_mask(positions, real), tf.boolean_mask(values, real)
    tensors = regions.space.tensors_of(places)
    kept = largest_entries(tensors, tf.abs(values), regions.space.counts)
    places, values = tf.gather(places, kept), tf.gather(values, kept)
    delivered = _is_in(places, tf.cast(mine, tf.int64))
    free = _free(places, regions)
    positions = tf.concat([places, free], axis=0)
    order = tf.argsort(positions)
    values = tf.gather(tf.pad(values, [[0, tf.size(free)]]), order)
    found = others._replace(positions=tf.gather(positions, order), values=values)
    return regions.space.write(found), delivered


def _message(
    positions: tf.Tensor, values: tf.Tensor, fine: tf.Tensor, regions: Regions
) -> tf.Tensor:
    layout, counts = regions.message
    coded = value_types.encode_values(values, layout[0].value_type)
    selection = SelectedEntries(tf.cast(positions, tf.int32), coded)
    return buffer.encode_sparse(layout, counts, [selection], fine)


def _behind(regions: Regions) -> tf.Tensor:
    """Return the places behind the space, for what is left of the room."""
    return regions.size + tf.range(tf.cast(regions.capacity, tf.int64))


def _check_places(
    positions: tf.Tensor, starts: tf.Tensor, owners: tf.Tensor, regions: Regions
) -> BufferCheck:
    """Return that all places, `[N, capacity]`, are in regions of these owners."""
    ends = tf.concat([starts[1:], [regions.size]], axis=0)
    low, high = (tf.gather(x, owners)[:, tf.newaxis] for x in (starts, ends))
    elsewhere = tf.logical_or(positions < low, positions >= high)
    wrong = tf.logical_and(positions < regions.size, elsewhere)
    count = tf.math.count_nonzero(wrong, axis=1, dtype=tf.int32)
    return BufferCheck("positions in the regions of others", count, 0)


def _is_first(ascending: tf.Tensor) -> tf.Tensor:
    same = tf.equal(ascending[1:], ascending[:-1])
    return tf.concat([tf.fill(tf.minimum(tf.shape(ascending), 1), True), ~same], axis=0)


def _is_in(ascending: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Return which places are among others."""
    padded = tf.concat([ascending, [-2]], axis=0)
    return tf.equal(tf.gather(padded, tf.searchsorted(ascending, places)), places)


def _free(taken: tf.Tensor, regions: Regions) -> tf.Tensor:
    """Return the first places that are free, as many of each tensor as are wanted."""
    counts, bases = regions.space.counts, regions.space.bases
    number = len(regions.space.sizes)
    tensors = tf.repeat(tf.range(number), counts)
    ranks = tf.range(tf.size(tensors, tf.int64))
    ranks -= tf.gather(tf.cumsum(counts, exclusive=True), tensors)
    places = tf.gather(bases, tensors) + ranks  # the first k of each tensor will do
    is_free = tf.logical_not(_is_in(taken, places))
    places = tf.boolean_mask(places, is_free)
    tensors = tf.boolean_mask(tensors, is_free)
    found = tf.math.bincount(
        regions.space.tensors_of(taken), minlength=len(regions.space.sizes)
    )
    wanted = counts - tf.cast(found, tf.int64)
    return tf.gather(places, largest_entries(tensors, tf.ones_like(places), wanted))


# --- Owning: entries go to the owners of regions, are summed there, and go to all.
#
# Natively where the operations are there, else by TensorFlow's (`regions.py`),
# with the same bits.


def read_entries(words: tf.Tensor, regions: Regions) -> FlatEntries:
    """Return what this worker's words hold.

    Args:
        words: words of this worker, int32 `[w]`.
        regions: regions of all workers.
    """
    library = native_library.load_library().library
    if library is None:
        return regions.space.read(words)
    form = regions.form
    positions, values = library.tf_dgc_read_places(
        words=words,
        counts=_counts(regions),
        A=regions.space.dtype,
        **_attributes(regions),
    )
    found = buffer.sent_values(words, *form)
    whole = [v for t, v in zip(form.layout, found, strict=True) if t.uncompressed]
    return FlatEntries(positions, values, whole, words[buffer.FLAGS_WORD])


def split_by_owner(
    own: FlatEntries, starts: tf.Tensor, regions: Regions
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
    library = native_library.load_library().library
    if library is None:
        return split_by_owner_with_tensorflow(own, starts, regions)
    rows, mine = library.tf_dgc_split_places(
        places=own.positions, values=own.values, **_arguments(starts, regions)
    )
    return tf.ensure_shape(rows, [regions.num_workers, _words(regions)]), mine


def sum_owned_entries(
    rows: tf.Tensor, starts: tf.Tensor, worker: int, regions: Regions
) -> tuple[tf.Tensor, Remainder]:
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
    library = native_library.load_library().library
    if library is None:
        return sum_owned_entries_with_tensorflow(rows, starts, worker, regions)
    block, places, sums = library.tf_dgc_collect_places(
        rows=rows,
        worker=worker,
        A=regions.space.dtype,
        **_arguments(starts, regions),
    )
    return block, Remainder(places, sums)


def combine_blocks(
    blocks: tf.Tensor,
    starts: tf.Tensor,
    mine: tf.Tensor,
    others: FlatEntries,
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
    library = native_library.load_library().library
    if library is None:
        return combine_blocks_with_tensorflow(blocks, starts, mine, others, regions)
    uncompressed = [t for t in regions.form.layout if t.uncompressed]
    coded = [
        value_types.encode_values(total, tensor.value_type)
        for tensor, total in zip(uncompressed, others.whole, strict=True)
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
        "fingerprint": buffer.layout_fingerprint(layout),
    }


def _arguments(starts: tf.Tensor, regions: Regions) -> dict[str, Any]:
    layout = regions.message.layout
    return {
        "counts": _counts(regions),
        "starts": starts,
        "rooms": regions.rooms,
        "capacity": regions.capacity,
        "message_size": layout[0].size,
        "message_fingerprint": buffer.layout_fingerprint(layout),
        **_attributes(regions),
    }


def _words(regions: Regions) -> int | None:
    length = buffer.sparse_words(*regions.message)
    return length if isinstance(length, int) else None
