"""Regions: the flat positions of all tensors, divided among workers as their owners.

The functions that split, sum and combine entries run as native operations if these are
available, else as TensorFlow operations (`..._with_tensorflow`), with the same bits.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc import native_library
from tf_dgc.codecs import buffer, value_types
from tf_dgc.codecs.buffer import SelectedEntries
from tf_dgc.codecs.checks import BufferCheck, all_hold, require
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import BufferLayout, Remainder
from tf_dgc.collectives.sparse_merge import FlatEntries, FlatIndexSpace, largest_entries


class Regions:
    """Positions of each worker's region, and the format of messages to and from owners.

    All compressed tensors are concatenated, and a worker's K entries are split evenly
    in this order: region i of N begins with entry number i K / N. The layout tells
    which tensor that is in; all workers' positions tell where in the tensor.

    A message to an owner, and an owner's block of sums, has room for `1 + slack` times
    the entries of an even split, of each tensor in the region. Both are sparse buffers
    of one tensor, the whole flat space; unused room holds zeros at positions beyond it.

    Attributes:
        layout: layout of a worker's words, with at least one compressed tensor.
        rooms: room for entries of each tensor in each region, int32 `[N, tensors]`.
        capacity: entries of a message, an int or a scalar int32 tensor.
        message: layout of messages and of owners' blocks.
    """

    def __init__(self, layout: BufferLayout, num_workers: int, slack: float):
        self.layout = layout
        self.space = FlatIndexSpace(layout)
        self.size = sum(self.space.sizes)
        self.num_workers = num_workers
        if all(isinstance(k, int) for k in layout.counts):
            with tf.init_scope():  # eager, so that the results are constants
                counts = FlatIndexSpace(layout).counts
                split = _split_evenly(counts, num_workers, slack)
            self._ranks, self.rooms = np.array(split[0]), np.array(split[1])
            self.capacity = int(split[2])
            padding = self.capacity
        else:
            split = _split_evenly(self.space.counts, num_workers, slack)
            self._ranks, self.rooms, self.capacity = split
            padding = self.size
        self.message = self._message_layout(padding)

    def offsets(self, positions: tf.Tensor) -> tf.Tensor:
        """Return where one worker's regions begin within their tensors.

        Positions are flat, int64 `[K]`. Offsets are float32 `[N - 1]`, without the
        first region; 0 for the first entry of a tensor.
        """
        tensors, are_first = self._first_tensors()
        bases = tf.gather(self.space.bases, tensors)
        offsets = tf.gather(positions, self._ranks[1:]) - bases
        offsets = tf.where(are_first, tf.zeros_like(offsets), offsets)
        return tf.cast(offsets, tf.float32)

    def starts(self, offsets: tf.Tensor) -> tf.Tensor:
        """Return where regions begin, int64 `[N]`, from the sum of all `offsets`."""
        tensors, _ = self._first_tensors()
        mean = tf.cast(tf.floor(offsets / self.num_workers), tf.int64)
        last = tf.gather(tf.constant(self.space.sizes, tf.int64), tensors) - 1
        starts = tf.clip_by_value(mean, tf.zeros_like(last), last)
        starts = tf.sort(starts + tf.gather(self.space.bases, tensors))
        starts = tf.concat([tf.zeros([1], tf.int64), starts], axis=0)
        # An empty region begins where the next one does.
        return tf.gather(starts, tf.searchsorted(self._ranks, self._ranks))

    def owners(self, starts: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Return the region of each position, int32."""
        return tf.searchsorted(starts, positions, side="right") - 1

    def _first_tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return each later region's tensor, and whether it begins with the tensor."""
        begins = tf.cumsum(self.space.counts, exclusive=True)
        ranks = self._ranks[1:]
        tensors = tf.searchsorted(begins, ranks, side="right") - 1
        return tensors, tf.equal(tf.gather(begins, tensors), ranks)

    def _message_layout(self, padding: int) -> BufferLayout:
        size = self.size + padding
        if size > 2**31 - 1:
            raise ValueError(
                "Regions have at most 2**31 - 1 positions, including those for unused "
                "room. Use another `collective`, such as `gtopk`. Received: "
                f"{self.size} entries in all tensors"
            )
        tensor = TensorSpec("entries of a region", (size,), self.space.dtype, False)
        return BufferLayout([tensor], [self.capacity])


def read_entries(words: tf.Tensor, regions: Regions) -> FlatEntries:
    """Return the entries in this worker's words, int32 `[w]`."""
    library = native_library.load_library().library
    if library is None:
        return regions.space.read(words)
    tensors, counts = regions.layout
    positions, values = library.tf_dgc_read_places(
        words=words,
        counts=_counts(regions),
        A=regions.space.dtype,
        **_layout_attributes(regions),
    )
    values_by_tensor = buffer.sent_values(words, tensors, counts)
    pairs = zip(tensors, values_by_tensor, strict=True)
    uncompressed = [values for tensor, values in pairs if tensor.uncompressed]
    return FlatEntries(positions, values, uncompressed, words[buffer.FLAGS_WORD])


def split_by_owner(
    entries: FlatEntries, starts: tf.Tensor, regions: Regions
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the messages to all owners, int32 `[N, w]`, and the positions in them.

    If a message has too little room for a tensor, it takes the tensor's largest entries
    by magnitude, and among equal ones the first; the position of others is -1.
    """
    library = native_library.load_library().library
    if library is None:
        return split_by_owner_with_tensorflow(entries, starts, regions)
    rows, sent = library.tf_dgc_split_places(
        places=entries.positions,
        values=entries.values,
        **_region_arguments(starts, regions),
    )
    length = buffer.sparse_words(regions.message.tensors, regions.message.counts)
    static_length = length if isinstance(length, int) else None
    return tf.ensure_shape(rows, [regions.num_workers, static_length]), sent


def sum_owned_entries(
    rows: tf.Tensor, starts: tf.Tensor, worker: int, regions: Regions
) -> tuple[tf.Tensor, Remainder]:
    """Return an owner's block for all workers, int32 `[w]`, and all sums of its region.

    Adds the messages in the order of workers. The block has the largest sums of each
    tensor that there is room for, chosen as in `split_by_owner`. If a message is
    damaged, the block has no sums but a flag, by which all workers reject it.
    """
    library = native_library.load_library().library
    if library is None:
        return sum_owned_entries_with_tensorflow(rows, starts, worker, regions)
    block, positions, sums = library.tf_dgc_collect_places(
        rows=rows,
        worker=worker,
        A=regions.space.dtype,
        **_region_arguments(starts, regions),
    )
    return block, Remainder(positions, sums)


def combine_blocks(
    blocks: tf.Tensor,
    starts: tf.Tensor,
    queries: tf.Tensor,
    summed: FlatEntries,
    regions: Regions,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the largest sums of all regions, as many of each tensor as the layout has.

    Sums are chosen as in `split_by_owner`. If there are fewer, zeros at the first free
    positions fill the buffer. Also returns whether each of the queries, int32 `[m]`, is
    in the result; they are flat positions, ascending except that some are -1. `summed`
    holds the sums of uncompressed tensors and of the flag; its positions are not used.
    Fails on all workers if a block or a message to an owner was invalid.
    """
    library = native_library.load_library().library
    if library is None:
        return combine_blocks_with_tensorflow(blocks, starts, queries, summed, regions)
    uncompressed = [t for t in regions.layout.tensors if t.uncompressed]
    coded = [
        value_types.encode_values(total, tensor.value_type)
        for tensor, total in zip(uncompressed, summed.uncompressed, strict=True)
    ]
    words, is_in_words = library.tf_dgc_unite_places(
        blocks=blocks,
        mine=queries,
        exempt=tf.concat([tf.zeros([0], tf.int32), *coded], axis=0),
        finite=tf.equal(summed.nonfinite, 0),
        A=regions.space.dtype,
        **_region_arguments(starts, regions),
    )
    return words, is_in_words


def split_by_owner_with_tensorflow(
    entries: FlatEntries, starts: tf.Tensor, regions: Regions
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute `split_by_owner` with TensorFlow operations."""
    owners = regions.owners(starts, entries.positions)
    tensors = regions.space.tensors_of(entries.positions)
    groups = owners * len(regions.space.sizes) + tensors
    rooms = tf.reshape(regions.rooms, [-1])
    largest = largest_entries(groups, tf.abs(entries.values), rooms)
    owners = tf.gather(owners, largest)
    largest_positions = tf.gather(entries.positions, largest)
    slots = tf.range(tf.size(largest)) - tf.searchsorted(owners, owners)
    indices = tf.stack([owners, slots], axis=1)
    shape = [regions.num_workers, regions.capacity]
    positions = tf.broadcast_to(_padding_positions(regions), shape)
    positions = tf.tensor_scatter_nd_update(positions, indices, largest_positions)
    values = tf.scatter_nd(indices, tf.gather(entries.values, largest), shape)
    messages = [
        _message(p, v, tf.constant(True), regions)
        for p, v in zip(
            tf.unstack(positions, regions.num_workers),
            tf.unstack(values, regions.num_workers),
            strict=True,
        )
    ]
    sent = tf.fill(tf.shape(entries.positions), tf.constant(-1, tf.int64))
    indices = largest[:, tf.newaxis]
    sent = tf.tensor_scatter_nd_update(sent, indices, largest_positions)
    return tf.stack(messages), tf.cast(sent, tf.int32)


def sum_owned_entries_with_tensorflow(
    rows: tf.Tensor, starts: tf.Tensor, worker: int, regions: Regions
) -> tuple[tf.Tensor, Remainder]:
    """Compute `sum_owned_entries` with TensorFlow operations."""
    flags, ((positions, values),), checks = buffer.parse_buffers(rows, *regions.message)
    positions = tf.cast(positions, tf.int64)
    owners = tf.fill([regions.num_workers], worker)
    checks += [_check_positions(positions, starts, owners, regions)]
    is_valid = all_hold([*checks, BufferCheck("flags", flags, 0)])
    positions = tf.where(is_valid, positions, _padding_positions(regions))
    is_used = positions < regions.size
    used_positions = tf.boolean_mask(positions, is_used)
    distinct = tf.sort(used_positions)
    distinct = tf.boolean_mask(distinct, _is_first(distinct))
    sums = tf.math.unsorted_segment_sum(
        tf.boolean_mask(values, is_used),
        tf.searchsorted(distinct, used_positions),
        tf.size(distinct),
    )
    tensors = regions.space.tensors_of(distinct)
    largest = largest_entries(tensors, tf.abs(sums), regions.rooms[worker])
    unused = regions.capacity - tf.size(largest)
    padding = _padding_positions(regions)[:unused]
    block_positions = tf.concat([tf.gather(distinct, largest), padding], axis=0)
    block_sums = tf.pad(tf.gather(sums, largest), [[0, unused]])
    block = _message(block_positions, block_sums, is_valid, regions)
    return block, Remainder(tf.cast(distinct, tf.int32), sums)


def combine_blocks_with_tensorflow(
    blocks: tf.Tensor,
    starts: tf.Tensor,
    queries: tf.Tensor,
    summed: FlatEntries,
    regions: Regions,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute `combine_blocks` with TensorFlow operations."""
    flags, ((positions, values),) = buffer.read_buffers(blocks, *regions.message)
    positions = tf.cast(positions, tf.int64)
    owners = tf.range(regions.num_workers)
    checks = [
        BufferCheck("damaged messages that it has received", flags, 0),
        _check_positions(positions, starts, owners, regions),
    ]
    positions, values = require(checks, (positions, values))
    is_used = positions < regions.size
    positions = tf.boolean_mask(positions, is_used)
    values = tf.boolean_mask(values, is_used)
    tensors = regions.space.tensors_of(positions)
    largest = largest_entries(tensors, tf.abs(values), regions.space.counts)
    positions, values = tf.gather(positions, largest), tf.gather(values, largest)
    is_in_words = _is_in(positions, tf.cast(queries, tf.int64))
    free = _free_positions(positions, regions)
    positions = tf.concat([positions, free], axis=0)
    order = tf.argsort(positions)
    values = tf.gather(tf.pad(values, [[0, tf.size(free)]]), order)
    result = summed._replace(positions=tf.gather(positions, order), values=values)
    return regions.space.write(result), is_in_words


def _split_evenly(
    counts: tf.Tensor, num_workers: int, slack: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Split entries, of which tensors have `counts`, int64 `[tensors]`, evenly.

    Returns the number of each region's first entry, int64 `[N]`; the room for entries
    of each tensor, int32 `[N, tensors]`; and the largest room of a region.
    """
    ends = tf.cumsum(counts)
    ranks = tf.range(num_workers + 1, dtype=tf.int64) * ends[-1] // num_workers
    low = tf.maximum(ranks[:-1, tf.newaxis], ends - counts)
    high = tf.minimum(ranks[1:, tf.newaxis], ends)
    shares = tf.cast(tf.maximum(high - low, 0), tf.float64)
    wide = tf.math.ceil(shares * (1 + slack))  # may exceed the range of integers
    rooms = tf.cast(tf.minimum(wide, tf.cast(counts, tf.float64)), tf.int32)
    capacity = tf.reduce_max(tf.reduce_sum(rooms, axis=1))
    return ranks[:-1], rooms, capacity


def _message(
    positions: tf.Tensor, values: tf.Tensor, finite: tf.Tensor, regions: Regions
) -> tf.Tensor:
    tensors, counts = regions.message
    coded = value_types.encode_values(values, tensors[0].value_type)
    selection = SelectedEntries(tf.cast(positions, tf.int32), coded)
    return buffer.encode_sparse(tensors, counts, [selection], finite)


def _padding_positions(regions: Regions) -> tf.Tensor:
    """Return the positions of unused room, beyond the space, int64 `[capacity]`."""
    return regions.size + tf.range(tf.cast(regions.capacity, tf.int64))


def _check_positions(
    positions: tf.Tensor, starts: tf.Tensor, owners: tf.Tensor, regions: Regions
) -> BufferCheck:
    """Check that row i of positions, `[N, capacity]`, is in the region of owner i."""
    ends = tf.concat([starts[1:], [regions.size]], axis=0)
    low, high = (tf.gather(x, owners)[:, tf.newaxis] for x in (starts, ends))
    is_outside = tf.logical_or(positions < low, positions >= high)
    is_wrong = tf.logical_and(positions < regions.size, is_outside)
    count = tf.math.count_nonzero(is_wrong, axis=1, dtype=tf.int32)
    return BufferCheck("positions in the regions of others", count, 0)


def _is_first(ascending: tf.Tensor) -> tf.Tensor:
    """Return whether each value is the first of its equals."""
    same = tf.equal(ascending[1:], ascending[:-1])
    return tf.concat([tf.fill(tf.minimum(tf.shape(ascending), 1), True), ~same], axis=0)


def _is_in(ascending: tf.Tensor, queries: tf.Tensor) -> tf.Tensor:
    """Return whether each query is among ascending positions, which are 0 or more."""
    padded = tf.concat([ascending, [-2]], axis=0)
    return tf.equal(tf.gather(padded, tf.searchsorted(ascending, queries)), queries)


def _free_positions(taken: tf.Tensor, regions: Regions) -> tf.Tensor:
    """Return the first free positions, as many as each tensor lacks entries."""
    counts, bases = regions.space.counts, regions.space.bases
    number = len(regions.space.sizes)
    # Among the first k positions of a tensor there are always enough.
    tensors = tf.repeat(tf.range(number), counts)
    ranks = tf.range(tf.size(tensors, tf.int64))
    ranks -= tf.gather(tf.cumsum(counts, exclusive=True), tensors)
    positions = tf.gather(bases, tensors) + ranks
    is_free = tf.logical_not(_is_in(taken, positions))
    positions = tf.boolean_mask(positions, is_free)
    tensors = tf.boolean_mask(tensors, is_free)
    num_taken = tf.math.bincount(regions.space.tensors_of(taken), minlength=number)
    limits = counts - tf.cast(num_taken, tf.int64)
    return tf.gather(
        positions, largest_entries(tensors, tf.ones_like(positions), limits)
    )


def _counts(regions: Regions) -> tf.Tensor:
    return tf.stack([tf.cast(k, tf.int32) for k in regions.layout.counts])


def _layout_attributes(regions: Regions) -> dict[str, Any]:
    tensors = regions.layout.tensors
    return {
        "T": [t.dtype for t in tensors],
        "sizes": [t.size for t in tensors],
        "value_types": [t.wire_name for t in tensors],
        "fingerprint": buffer.layout_fingerprint(tensors),
    }


def _region_arguments(starts: tf.Tensor, regions: Regions) -> dict[str, Any]:
    message = regions.message.tensors
    return {
        "counts": _counts(regions),
        "starts": starts,
        "rooms": regions.rooms,
        "capacity": regions.capacity,
        "message_size": message[0].size,
        "message_fingerprint": buffer.layout_fingerprint(message),
        **_layout_attributes(regions),
    }
