"""Entries: two workers' buffers as one of the same form, cut to the largest."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc import native_library
from tf_dgc.codecs import buffer, value_types
from tf_dgc.codecs.buffer import SelectedEntries
from tf_dgc.codecs.checks import hold_per_worker
from tf_dgc.collectives.requests import BufferLayout
from tf_dgc.smart_cond import add_counts

# --- Space: the places of all compressed tensors, one behind the other.


class FlatEntries(NamedTuple):
    """What a buffer holds.

    Attributes:
        positions: places of the entries in the space: ascending, int64 `[K]`.
        values: values there, `[K]`.
        whole: values of each exempt tensor, `[n]`.
        flag: scalar int32, 1 if a gradient in it was not finite, else 0.
    """

    positions: tf.Tensor
    values: tf.Tensor
    whole: Sequence[tf.Tensor]
    flag: tf.Tensor


class FlatIndexSpace:
    """All places of a form's tensors that are not exempt, and their entries as words.

    Args:
        form: form of the words.

    Attributes:
        sizes: number of entries of each of these tensors.
        counts: number of them in a buffer, int64 `[tensors]`.
        bases: place of the first entry of each, int64 `[tensors]`.
        dtype: type of values, float64 if one of the tensors has it.
    """

    def __init__(self, form: BufferLayout):
        self._form = form
        pairs = list(zip(form.layout, form.counts, strict=True))
        sparse = [(t, k) for t, k in pairs if not t.uncompressed]
        self.sizes = [t.size for t, _ in sparse]
        counts = [tf.cast(k, tf.int64) for _, k in sparse]
        self.counts = tf.stack(counts) if counts else tf.zeros([0], tf.int64)
        self.bases = tf.cumsum(tf.constant(self.sizes, tf.int64), exclusive=True)
        wide = any(t.dtype == tf.float64 for t, _ in sparse)
        # Sums of two float32 in float64 are rounded to the same.
        self.dtype = tf.float64 if wide else tf.float32

    def tensors_of(self, positions: tf.Tensor) -> tf.Tensor:
        """Return which of the tensors each place is in, int32."""
        return tf.searchsorted(self.bases, positions, side="right") - 1

    def read(self, words: tf.Tensor) -> FlatEntries:
        """Return what a worker's words hold; refused if they were damaged.

        Args:
            words: buffer, int32 `[w]`.
        """
        layout, counts = self._form
        flags, found = buffer.read_buffers(words[tf.newaxis], layout, counts)
        bases = iter(tf.unstack(self.bases, len(self.sizes)))
        positions = [
            tf.cast(where[0], tf.int64) + next(bases)
            for where, _ in found
            if where is not None
        ]
        values = [tf.cast(v[0], self.dtype) for where, v in found if where is not None]
        whole = [v[0] for where, v in found if where is None]
        return FlatEntries(
            tf.concat(positions, axis=0), tf.concat(values, axis=0), whole, flags[0]
        )

    def write(self, entries: FlatEntries) -> tf.Tensor:
        """Return entries as words, int32 `[w]`."""
        layout, counts = self._form
        number = tf.unstack(self.counts, len(self.sizes))
        places = iter(
            zip(
                tf.split(entries.positions, number),
                tf.split(entries.values, number),
                tf.unstack(self.bases, len(self.sizes)),
                strict=True,
            )
        )
        whole = iter(entries.whole)
        selections = []
        for tensor in layout:
            if tensor.uncompressed:
                positions, values = None, next(whole)
            else:
                where, values, base = next(places)
                positions = tf.cast(where - base, tf.int32)
                values = tf.cast(values, tensor.dtype)
            coded = value_types.encode_values(values, tensor.value_type)
            selections.append(SelectedEntries(positions, coded))
        return buffer.encode_sparse(
            layout, counts, selections, tf.equal(entries.flag, 0)
        )


def largest_entries(
    groups: tf.Tensor, magnitudes: tf.Tensor, limits: tf.Tensor
) -> tf.Tensor:
    """Return which entries are among the largest of their group, ascending.

    Of equal ones, those that come first.

    Args:
        groups: group of each entry, an integer `[m]`.
        magnitudes: magnitude of each, `[m]`.
        limits: number of entries of each group that are wanted, int `[groups]`.
    """
    descending = tf.argsort(magnitudes, direction="DESCENDING", stable=True)
    of_each = tf.gather(groups, descending)
    order = tf.argsort(of_each, stable=True)
    of_each = tf.gather(of_each, order)
    ranks = tf.range(tf.size(order)) - tf.searchsorted(of_each, of_each)
    chosen = tf.less(ranks, tf.cast(tf.gather(limits, of_each), tf.int32))
    return tf.sort(tf.boolean_mask(tf.gather(descending, order), chosen))


def num_sparse_entries(form: BufferLayout) -> int | tf.Tensor:
    """Return the entries of all tensors that are not exempt: an int, or int64."""
    pairs = zip(form.layout, form.counts, strict=True)
    return add_counts([k for tensor, k in pairs if not tensor.uncompressed])


def merge_buffers(
    mine: tf.Tensor, theirs: tf.Tensor, form: BufferLayout
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
    library = native_library.load_library().library
    if library is None:
        return merge_buffers_with_tensorflow(mine, theirs, form)
    words, places = library.tf_dgc_merge(
        mine=mine,
        theirs=theirs,
        counts=tf.stack([tf.cast(k, tf.int32) for k in form.counts]),
        T=[t.dtype for t in form.layout],
        sizes=[t.size for t in form.layout],
        value_types=[t.wire_name for t in form.layout],
        fingerprint=buffer.layout_fingerprint(form.layout),
    )
    return tf.ensure_shape(words, mine.shape), places


def merge_buffers_with_tensorflow(
    mine: tf.Tensor, theirs: tf.Tensor, form: BufferLayout
) -> tuple[tf.Tensor, tf.Tensor]:
    """Do what `merge` does by TensorFlow's operations."""
    space = FlatIndexSpace(form)

    def merged() -> tuple[tf.Tensor, tf.Tensor]:
        own = space.read(mine)
        both = _merge(space, own, space.read(theirs))
        place = tf.searchsorted(both.positions, own.positions)
        last = tf.size(both.positions) - 1
        found = tf.gather(both.positions, tf.minimum(place, last))
        places = tf.where(tf.equal(found, own.positions), place, -1)
        return tf.ensure_shape(space.write(both), mine.shape), places

    *_, checks = buffer.parse_buffers(tf.stack([mine, theirs]), *form)
    fine = hold_per_worker(checks)
    agreed = buffer.layout_fingerprint(form.layout)
    nowhere = tf.fill([tf.reduce_sum(space.counts)], -1)
    return tf.cond(
        tf.reduce_all(fine),
        merged,
        lambda: (
            buffer.invalidate_unless(agreed, tf.where(fine[0], theirs, mine)),
            nowhere,
        ),
    )


def _merge(space: FlatIndexSpace, one: FlatEntries, other: FlatEntries) -> FlatEntries:
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
    kept = largest_entries(space.tensors_of(positions), magnitudes, space.counts)
    return FlatEntries(
        tf.gather(positions, kept),
        tf.gather(values, kept),
        [a + b for a, b in zip(one.whole, other.whole, strict=True)],
        tf.bitwise.bitwise_or(one.flag, other.flag),
    )
