"""What `owning` does, by TensorFlow's operations: the definition."""

import tensorflow as tf

from tf_dgc.codecs import value_types, wire
from tf_dgc.codecs.checks import Check, gate, hold
from tf_dgc.codecs.wire import Selection
from tf_dgc.collectives.regions import Regions
from tf_dgc.collectives.requests import Left
from tf_dgc.collectives.space import Entries, largest


def split(
    own: Entries, starts: tf.Tensor, regions: Regions
) -> tuple[tf.Tensor, tf.Tensor]:
    """Do what `owning.split` does."""
    owners = regions.owners(starts, own.positions)
    groups = owners * len(regions.space.sizes) + regions.space.tensors_of(own.positions)
    kept = largest(groups, tf.abs(own.values), tf.reshape(regions.rooms, [-1]))
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


def collect(
    rows: tf.Tensor, starts: tf.Tensor, worker: int, regions: Regions
) -> tuple[tf.Tensor, Left]:
    """Do what `owning.collect` does."""
    flags, ((positions, values),), checks = wire.inspect(rows, *regions.message)
    positions = tf.cast(positions, tf.int64)
    owners = tf.fill([regions.num_workers], worker)
    checks += [_check_places(positions, starts, owners, regions)]
    fine = hold([*checks, Check("flags", flags, 0)])
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
    kept = largest(tensors, tf.abs(sums), regions.rooms[worker])
    left = regions.capacity - tf.size(kept)
    positions = tf.concat([tf.gather(distinct, kept), _behind(regions)[:left]], axis=0)
    largest_sums = tf.pad(tf.gather(sums, kept), [[0, left]])
    block = _message(positions, largest_sums, fine, regions)
    return block, Left(tf.cast(distinct, tf.int32), sums)


def unite(
    blocks: tf.Tensor,
    starts: tf.Tensor,
    mine: tf.Tensor,
    others: Entries,
    regions: Regions,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Do what `owning.unite` does."""
    flags, ((positions, values),) = wire.read(blocks, *regions.message)
    positions = tf.cast(positions, tf.int64)
    owners = tf.range(regions.num_workers)
    checks = [
        Check("damaged messages that it has received", flags, 0),
        _check_places(positions, starts, owners, regions),
    ]
    positions, values = gate(checks, (positions, values))
    real = positions < regions.size
    places, values = tf.boolean_mask(positions, real), tf.boolean_mask(values, real)
    tensors = regions.space.tensors_of(places)
    kept = largest(tensors, tf.abs(values), regions.space.counts)
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
    coded = value_types.encode(values, layout[0].value_type)
    selection = Selection(tf.cast(positions, tf.int32), coded)
    return wire.encode(layout, counts, [selection], fine)


def _behind(regions: Regions) -> tf.Tensor:
    """Return the places behind the space, for what is left of the room."""
    return regions.size + tf.range(tf.cast(regions.capacity, tf.int64))


def _check_places(
    positions: tf.Tensor, starts: tf.Tensor, owners: tf.Tensor, regions: Regions
) -> Check:
    """Return that all places, `[N, capacity]`, are in regions of these owners."""
    ends = tf.concat([starts[1:], [regions.size]], axis=0)
    low, high = (tf.gather(x, owners)[:, tf.newaxis] for x in (starts, ends))
    elsewhere = tf.logical_or(positions < low, positions >= high)
    wrong = tf.logical_and(positions < regions.size, elsewhere)
    count = tf.math.count_nonzero(wrong, axis=1, dtype=tf.int32)
    return Check("positions in the regions of others", count, 0)


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
    return tf.gather(places, largest(tensors, tf.ones_like(places), wanted))
