"""Merges two workers' sparse buffers into one of the same layout."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_dgc import native_library
from tf_dgc.codecs import buffer, value_types
from tf_dgc.codecs.buffer import SelectedEntries
from tf_dgc.codecs.checks import hold_per_worker
from tf_dgc.collectives.requests import BufferLayout
from tf_dgc.conditions import add_counts


def merge_buffers(
    mine: tf.Tensor, theirs: tf.Tensor, layout: BufferLayout
) -> tuple[tf.Tensor, tf.Tensor]:
    """Add two buffers, int32 `[w]`, and keep as many entries per tensor as each had.

    Keeps the largest sums by magnitude, and among equal ones the first: the result does
    not depend on the order of the arguments. Uncompressed tensors are summed whole. The
    values must have the dtype in which they are accumulated. Also returns the position
    in the result of each entry of `mine`, int32, -1 if it was dropped.

    An invalid buffer becomes the result, so that all workers that wait for the result
    reject it. If it is of another model it also gets a wrong checksum, since to other
    workers it may be valid: this worker's model may be the wrong one.
    """
    library = native_library.load_library().library
    if library is None:
        return merge_buffers_with_tensorflow(mine, theirs, layout)
    words, positions = library.tf_dgc_merge(
        mine=mine,
        theirs=theirs,
        counts=tf.stack([tf.cast(k, tf.int32) for k in layout.counts]),
        T=[t.dtype for t in layout.tensors],
        sizes=[t.size for t in layout.tensors],
        value_types=[t.wire_name for t in layout.tensors],
        fingerprint=buffer.layout_fingerprint(layout.tensors),
    )
    return tf.ensure_shape(words, mine.shape), positions


def merge_buffers_with_tensorflow(
    mine: tf.Tensor, theirs: tf.Tensor, layout: BufferLayout
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute `merge_buffers` with TensorFlow operations."""
    space = FlatIndexSpace(layout)
    *_, checks = buffer.parse_buffers(
        tf.stack([mine, theirs]), layout.tensors, layout.counts
    )
    are_valid = hold_per_worker(checks)

    def merged() -> tuple[tf.Tensor, tf.Tensor]:
        entries = space.read(mine)
        result = _merge_entries(space, entries, space.read(theirs))
        slots = tf.searchsorted(result.positions, entries.positions)
        last = tf.size(result.positions) - 1
        candidates = tf.gather(result.positions, tf.minimum(slots, last))
        slots = tf.where(tf.equal(candidates, entries.positions), slots, -1)
        return tf.ensure_shape(space.write(result), mine.shape), slots

    def rejected() -> tuple[tf.Tensor, tf.Tensor]:
        fingerprint = buffer.layout_fingerprint(layout.tensors)
        words = tf.where(are_valid[0], theirs, mine)
        slots = tf.fill([tf.reduce_sum(space.counts)], -1)
        return buffer.invalidate_unless(fingerprint, words), slots

    result: tuple[tf.Tensor, tf.Tensor] = tf.cond(
        tf.reduce_all(are_valid), merged, rejected
    )
    return result


class FlatEntries(NamedTuple):
    """Content of a sparse buffer."""

    positions: tf.Tensor  # in a `FlatIndexSpace`, ascending, int64 `[K]`
    values: tf.Tensor  # `[K]`
    uncompressed: Sequence[tf.Tensor]  # `[n]` of each such tensor
    nonfinite: tf.Tensor  # scalar int32, 1 if a gradient was not finite, else 0


class FlatIndexSpace:
    """Positions in the concatenation of all compressed tensors of a layout."""

    def __init__(self, layout: BufferLayout):
        self._layout = layout
        pairs = list(zip(layout.tensors, layout.counts, strict=True))
        compressed = [(t, k) for t, k in pairs if not t.uncompressed]
        self.sizes = [t.size for t, _ in compressed]
        counts = [tf.cast(k, tf.int64) for _, k in compressed]
        self.counts = tf.stack(counts) if counts else tf.zeros([0], tf.int64)
        # Flat position of each tensor's first entry.
        self.bases = tf.cumsum(tf.constant(self.sizes, tf.int64), exclusive=True)
        has_float64 = any(t.dtype == tf.float64 for t, _ in compressed)
        # Sums of two float32 in float64 round to the same float32.
        self.dtype = tf.float64 if has_float64 else tf.float32

    def tensors_of(self, positions: tf.Tensor) -> tf.Tensor:
        """Return the index of the tensor that each position is in, int32."""
        return tf.searchsorted(self.bases, positions, side="right") - 1

    def read(self, words: tf.Tensor) -> FlatEntries:
        """Return the content of a worker's words, int32 `[w]`; rejects damaged ones."""
        flags, tensors = buffer.read_buffers(
            words[tf.newaxis], self._layout.tensors, self._layout.counts
        )
        bases = iter(tf.unstack(self.bases, len(self.sizes)))
        positions, values, uncompressed = [], [], []
        for tensor_positions, tensor_values in tensors:
            if tensor_positions is None:
                uncompressed.append(tensor_values[0])
            else:
                positions.append(tf.cast(tensor_positions[0], tf.int64) + next(bases))
                values.append(tf.cast(tensor_values[0], self.dtype))
        return FlatEntries(
            tf.concat(positions, axis=0),
            tf.concat(values, axis=0),
            uncompressed,
            flags[0],
        )

    def write(self, entries: FlatEntries) -> tf.Tensor:
        """Return entries as words, int32 `[w]`."""
        tensors, counts = self._layout
        lengths = tf.unstack(self.counts, len(self.sizes))
        compressed = zip(
            tf.split(entries.positions, lengths),
            tf.split(entries.values, lengths),
            tf.unstack(self.bases, len(self.sizes)),
            strict=True,
        )
        uncompressed = iter(entries.uncompressed)
        selections = []
        for tensor in tensors:
            if tensor.uncompressed:
                positions, values = None, next(uncompressed)
            else:
                positions, values, base = next(compressed)
                positions = tf.cast(positions - base, tf.int32)
                values = tf.cast(values, tensor.dtype)
            coded = value_types.encode_values(values, tensor.value_type)
            selections.append(SelectedEntries(positions, coded))
        finite = tf.equal(entries.nonfinite, 0)
        return buffer.encode_sparse(tensors, counts, selections, finite)


def largest_entries(
    groups: tf.Tensor, magnitudes: tf.Tensor, limits: tf.Tensor
) -> tf.Tensor:
    """Return the indices of the largest entries of each group, ascending.

    Among equal magnitudes the first are taken, at most `limits` of each group.
    """
    descending = tf.argsort(magnitudes, direction="DESCENDING", stable=True)
    sorted_groups = tf.gather(groups, descending)
    order = tf.argsort(sorted_groups, stable=True)
    sorted_groups = tf.gather(sorted_groups, order)
    ranks = tf.range(tf.size(order)) - tf.searchsorted(sorted_groups, sorted_groups)
    chosen = tf.less(ranks, tf.cast(tf.gather(limits, sorted_groups), tf.int32))
    return tf.sort(tf.boolean_mask(tf.gather(descending, order), chosen))


def num_sparse_entries(layout: BufferLayout) -> int | tf.Tensor:
    """Return the entries of all compressed tensors in a buffer: an int, or int64."""
    pairs = zip(layout.tensors, layout.counts, strict=True)
    return add_counts([k for tensor, k in pairs if not tensor.uncompressed])


def _merge_entries(
    space: FlatIndexSpace, one: FlatEntries, other: FlatEntries
) -> FlatEntries:
    positions = tf.concat([one.positions, other.positions], axis=0)
    order = tf.argsort(positions, stable=True)
    positions = tf.gather(positions, order)
    values = tf.gather(tf.concat([one.values, other.values], axis=0), order)
    same = tf.equal(positions[:-1], positions[1:])  # at most two are equal
    is_first_of_pair, is_second_of_pair = tf.pad(same, [[0, 1]]), tf.pad(same, [[1, 0]])
    zeros = tf.zeros_like(values)
    values += tf.where(is_first_of_pair, tf.roll(values, -1, axis=0), zeros)
    magnitudes = tf.where(is_second_of_pair, zeros - 1, tf.abs(values))
    largest = largest_entries(space.tensors_of(positions), magnitudes, space.counts)
    return FlatEntries(
        tf.gather(positions, largest),
        tf.gather(values, largest),
        [a + b for a, b in zip(one.uncompressed, other.uncompressed, strict=True)],
        tf.bitwise.bitwise_or(one.nonfinite, other.nonfinite),
    )
