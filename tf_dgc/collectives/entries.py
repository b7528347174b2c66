"""Entries: two workers' buffers as one of the same form, cut to the largest."""

import tensorflow as tf

from tf_dgc.choice import add_up
from tf_dgc.codecs import header, wire
from tf_dgc.codecs.checks import hold_of_each
from tf_dgc.collectives.requests import Form
from tf_dgc.collectives.space import Entries, Space, largest
from tf_dgc.ops import loader


def num_chosen(form: Form) -> int | tf.Tensor:
    """Return the entries of all tensors that are not exempt: an int, or int64."""
    pairs = zip(form.layout, form.counts, strict=True)
    return add_up([k for tensor, k in pairs if not tensor.exempt])


def merge(
    mine: tf.Tensor, theirs: tf.Tensor, form: Form
) -> tuple[tf.Tensor, tf.Tensor]:
    """Add up what both hold; keep as many entries of each tensor as each has.

    The largest by magnitude, and of equal ones those that come first: the result is the
    same if both change places. Exempt tensors are summed whole.

    Args:
        mine: words of this worker, int32 `[w]`.
        theirs: words of another one, int32 `[w]`.
        form: form of both, in which no value is narrower than what is accumulated.

    Returns:
        The words of the result, int32 `[w]`; and where in it each entry of `mine` is,
        int32 `[num_chosen(form)]`, -1 where it is left out, by tensor and position.
        Words that are to be refused go on, to be refused by all who wait for the
        result; if they are of another model, with a checksum that is wrong, as it may
        be this worker that has another one.
    """
    library = loader.native().library
    if library is None:
        return merge_by_tensorflow(mine, theirs, form)
    words, places = library.tf_dgc_merge(
        mine=mine,
        theirs=theirs,
        counts=tf.stack([tf.cast(k, tf.int32) for k in form.counts]),
        T=[t.dtype for t in form.layout],
        sizes=[t.size for t in form.layout],
        value_types=[t.wire_name for t in form.layout],
        fingerprint=wire.fingerprint(form.layout),
    )
    return tf.ensure_shape(words, mine.shape), places


def merge_by_tensorflow(
    mine: tf.Tensor, theirs: tf.Tensor, form: Form
) -> tuple[tf.Tensor, tf.Tensor]:
    """Do what `merge` does by TensorFlow's operations."""
    space = Space(form)

    def merged() -> tuple[tf.Tensor, tf.Tensor]:
        own = space.read(mine)
        both = _merge(space, own, space.read(theirs))
        place = tf.searchsorted(both.positions, own.positions)
        last = tf.size(both.positions) - 1
        found = tf.gather(both.positions, tf.minimum(place, last))
        places = tf.where(tf.equal(found, own.positions), place, -1)
        return tf.ensure_shape(space.write(both), mine.shape), places

    *_, checks = wire.inspect(tf.stack([mine, theirs]), *form)
    fine = hold_of_each(checks)
    agreed = wire.fingerprint(form.layout)
    nowhere = tf.fill([tf.reduce_sum(space.counts)], -1)
    return tf.cond(
        tf.reduce_all(fine),
        merged,
        lambda: (
            header.spoil_unless_of(agreed, tf.where(fine[0], theirs, mine)),
            nowhere,
        ),
    )


def _merge(space: Space, one: Entries, other: Entries) -> Entries:
    """Add up two workers' entries; keep as many of the largest as each has.

    The result is the same if they change places.
    """
    positions = tf.concat([one.positions, other.positions], axis=0)
    order = tf.argsort(positions, stable=True)
    positions = tf.gather(positions, order)
    values = tf.gather(tf.concat([one.values, other.values], axis=0), order)
    same = tf.equal(positions[:-1], positions[1:])  # at most two are
    has_next, is_next = tf.pad(same, [[0, 1]]), tf.pad(same, [[1, 0]])
    nothing = tf.zeros_like(values)
    values += tf.where(has_next, tf.roll(values, -1, axis=0), nothing)
    magnitudes = tf.where(is_next, nothing - 1, tf.abs(values))
    kept = largest(space.tensors_of(positions), magnitudes, space.counts)
    return Entries(
        tf.gather(positions, kept),
        tf.gather(values, kept),
        [a + b for a, b in zip(one.whole, other.whole, strict=True)],
        tf.bitwise.bitwise_or(one.flag, other.flag),
    )
