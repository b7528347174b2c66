"""Space: the places of all compressed tensors, one behind the other."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc.codecs import value_types, wire
from tf_dgc.codecs.wire import Selection
from tf_dgc.collectives.requests import Form


class Entries(NamedTuple):
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


class Space:
    """All places of a form's tensors that are not exempt, and their entries as words.

    Args:
        form: form of the words.

    Attributes:
        sizes: number of entries of each of these tensors.
        counts: number of them in a buffer, int64 `[tensors]`.
        bases: place of the first entry of each, int64 `[tensors]`.
        dtype: type of values, float64 if one of the tensors has it.
    """

    def __init__(self, form: Form):
        self._form = form
        pairs = list(zip(form.layout, form.counts, strict=True))
        sparse = [(t, k) for t, k in pairs if not t.exempt]
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

    def read(self, words: tf.Tensor) -> Entries:
        """Return what a worker's words hold; refused if they were damaged.

        Args:
            words: buffer, int32 `[w]`.
        """
        layout, counts = self._form
        flags, found = wire.read(words[tf.newaxis], layout, counts)
        bases = iter(tf.unstack(self.bases, len(self.sizes)))
        positions = [
            tf.cast(where[0], tf.int64) + next(bases)
            for where, _ in found
            if where is not None
        ]
        values = [tf.cast(v[0], self.dtype) for where, v in found if where is not None]
        whole = [v[0] for where, v in found if where is None]
        return Entries(
            tf.concat(positions, axis=0), tf.concat(values, axis=0), whole, flags[0]
        )

    def write(self, entries: Entries) -> tf.Tensor:
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
            if tensor.exempt:
                positions, values = None, next(whole)
            else:
                where, values, base = next(places)
                positions = tf.cast(where - base, tf.int32)
                values = tf.cast(values, tensor.dtype)
            coded = value_types.encode(values, tensor.value_type)
            selections.append(Selection(positions, coded))
        return wire.encode(layout, counts, selections, tf.equal(entries.flag, 0))


def largest(groups: tf.Tensor, magnitudes: tf.Tensor, limits: tf.Tensor) -> tf.Tensor:
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
