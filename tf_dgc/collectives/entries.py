"""Entries: two workers' buffers as one of the same form, cut to the largest."""

from typing import NamedTuple

import tensorflow as tf

from tf_dgc.choice import add_up
from tf_dgc.codecs import value_types, wire
from tf_dgc.codecs.wire import Selection
from tf_dgc.collectives.requests import Form
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

    Raises:
        tf.errors.InvalidArgumentError: when run, for words that are refused.
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
    space = _Space(form)
    own = space.read(mine)
    merged = space.merge(own, space.read(theirs))
    place = tf.searchsorted(merged.positions, own.positions)
    last = tf.size(merged.positions) - 1
    found = tf.gather(merged.positions, tf.minimum(place, last))
    places = tf.where(tf.equal(found, own.positions), place, -1)
    return tf.ensure_shape(space.write(merged), mine.shape), places


class _Entries(NamedTuple):
    """What a buffer holds.

    Attributes:
        positions: places of the entries in all tensors that are not exempt, one behind
            the other: ascending, int64 `[K]`.
        values: values there, `[K]`.
        whole: values of each exempt tensor, `[n]`.
        flag: scalar int32, 1 if a gradient in it was not finite, else 0.
    """

    positions: tf.Tensor
    values: tf.Tensor
    whole: list[tf.Tensor]
    flag: tf.Tensor


class _Space:
    """All places of a form, and the conversion from words to entries and back.

    Args:
        form: form of the words.
    """

    def __init__(self, form: Form):
        self._form = form
        pairs = list(zip(form.layout, form.counts, strict=True))
        self._sparse = [(t, k) for t, k in pairs if not t.exempt]
        self._counts = tf.stack([tf.cast(k, tf.int64) for _, k in self._sparse])
        sizes = tf.constant([t.size for t, _ in self._sparse], tf.int64)
        self._bases = tf.cumsum(sizes, exclusive=True)
        wide = any(t.dtype == tf.float64 for t, _ in self._sparse)
        # Sums of two float32 in float64 are rounded to the same.
        self._dtype = tf.float64 if wide else tf.float32

    def read(self, words: tf.Tensor) -> _Entries:
        """Return what a worker's words hold; refused if they were damaged.

        Args:
            words: buffer, int32 `[w]`.
        """
        layout, counts = self._form
        flags, found = wire.read(words[tf.newaxis], layout, counts)
        bases = iter(tf.unstack(self._bases, len(self._sparse)))
        positions = [
            tf.cast(where[0], tf.int64) + next(bases)
            for where, _ in found
            if where is not None
        ]
        values = [tf.cast(v[0], self._dtype) for where, v in found if where is not None]
        whole = [v[0] for where, v in found if where is None]
        return _Entries(
            tf.concat(positions, axis=0), tf.concat(values, axis=0), whole, flags[0]
        )

    def write(self, entries: _Entries) -> tf.Tensor:
        """Return entries as words, int32 `[w]`."""
        layout, counts = self._form
        number = [k for _, k in self._sparse]
        places = iter(
            zip(
                tf.split(entries.positions, number),
                tf.split(entries.values, number),
                tf.unstack(self._bases, len(self._sparse)),
                strict=True,
            )
        )
        whole = iter(entries.whole)
        selections = []
        for tensor in layout:
            if tensor.exempt:
                positions, values = None, next(whole)
            else:
                where, values, base = next(places)
                positions = tf.cast(where - base, tf.int32)
                values = tf.cast(values, tensor.dtype)
            coded = value_types.encode(values, tensor.value_type)
            selections.append(Selection(positions, coded))
        return wire.encode(layout, counts, selections, tf.equal(entries.flag, 0))

    def merge(self, one: _Entries, other: _Entries) -> _Entries:
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
        kept = tf.sort(self._largest(positions, magnitudes))
        return _Entries(
            tf.gather(positions, kept),
            tf.gather(values, kept),
            [a + b for a, b in zip(one.whole, other.whole, strict=True)],
            tf.bitwise.bitwise_or(one.flag, other.flag),
        )

    def _largest(self, positions: tf.Tensor, magnitudes: tf.Tensor) -> tf.Tensor:
        """Return which of twice as many are the largest of each tensor."""
        descending = tf.argsort(magnitudes, direction="DESCENDING", stable=True)
        tensors = tf.searchsorted(
            self._bases, tf.gather(positions, descending), side="right"
        )
        order = tf.argsort(tensors, stable=True)
        tensors = tf.gather(tensors, order) - 1
        starts = 2 * tf.cumsum(self._counts, exclusive=True)
        ranks = tf.range(tf.size(order, tf.int64)) - tf.gather(starts, tensors)
        chosen = tf.less(ranks, tf.gather(self._counts, tensors))
        return tf.boolean_mask(tf.gather(descending, order), chosen)
