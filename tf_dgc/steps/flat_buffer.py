"""Flat buffers: several tensors that a method compresses as one.

Most methods compress each tensor by itself. Methods of the `entire_model` compress all
tensors of one dtype, except uncompressed ones, as one flat tensor.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_dgc._internals import tracing
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives.requests import (
    DenseOrEntries,
    Result,
    SparseEntries,
    position_mask,
    to_dense_tensor,
)
from tf_dgc.compressors.random_keys import RandomKeys


class FlatView(NamedTuple):
    """Tensors of a step that a method compresses as one."""

    places: list[int]  # indices of the tensors in the step
    tensors: list[TensorSpec]
    seen: TensorSpec  # spec of the tensor that the method compresses

    @property
    def is_flat(self) -> bool:
        """Whether the tensors are concatenated."""
        return self.seen is not self.tensors[0]

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each tensor."""
        return [t.size for t in self.tensors]

    def values(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the method's input from the values of all tensors of the step."""
        flat = [tf.reshape(values[i], [-1]) for i in self.places]
        joined = tf.concat(flat, axis=0) if self.is_flat else flat[0]
        return tf.reshape(joined, self.seen.shape)

    def state(self, states: Sequence[dict[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Return the method's state, with the states of all tensors concatenated."""
        own_states = [states[i] for i in self.places]
        if not self.is_flat:
            return own_states[0]
        return {
            name: tf.concat([tf.reshape(s[name], [-1]) for s in own_states], axis=0)
            for name in own_states[0]
        }

    def keys(self, keys_per_tensor: Sequence[RandomKeys]) -> RandomKeys:
        """Return the random keys, which are those of the first tensor."""
        first = keys_per_tensor[self.places[0]]
        return first.of_sizes(self.sizes) if self.is_flat else first

    def results(
        self, result: Result, states: Sequence[dict[str, tf.Tensor]]
    ) -> list[Result]:
        """Split the method's result into one per tensor; `states` are the old ones."""
        if not self.is_flat:
            return [result]
        if tracing.in_xla_context():  # numbers of entries per tensor are dynamic
            result = _to_dense(result)
        sums, sent, chosen = map(self._split, (result.sum, result.sent, result.chosen))
        counted = sent if result.chosen is None else chosen
        own_states = [states[i] for i in self.places]
        new_states = {
            name: _split_state(value, [s[name].shape for s in own_states])
            for name, value in (result.state or {}).items()
            if name in own_states[0]
        }
        return [
            Result(
                sums[i],
                sent[i],
                {name: values[i] for name, values in new_states.items()},
                None if result.entries is None else _count_sent(counted[i]),
                chosen[i],
            )
            for i in range(len(self.tensors))
        ]

    def _split(self, values: DenseOrEntries | None) -> list[Any]:
        if values is None:
            return [None] * len(self.tensors)
        if isinstance(values, list):
            return list(map(list, zip(*map(self._split, values), strict=True)))
        if isinstance(values, SparseEntries):
            return self._split_entries(values)
        return list(tf.split(tf.reshape(values, [-1]), self.sizes))

    def _split_entries(self, entries: SparseEntries) -> list[SparseEntries]:
        ends = list(itertools.accumulate(self.sizes))
        entries_before = tf.searchsorted(entries.positions, ends)
        counts = entries_before - tf.concat([[0], entries_before[:-1]], axis=0)
        positions = tf.split(entries.positions, counts, num=len(ends))
        values = tf.split(entries.values, counts, num=len(ends))
        return [
            SparseEntries(p - (end - size), v, size)
            for p, v, end, size in zip(positions, values, ends, self.sizes, strict=True)
        ]


def dtype_and_bound(tensor: TensorSpec) -> tuple[tf.DType, tf.DType | None]:
    """Return what tensors must have in common to be concatenated."""
    return tensor.dtype, tensor.narrow_dtype


def flat_views(tensors: Sequence[TensorSpec], entire_model: bool) -> list[FlatView]:
    """Return the tensors that a method compresses, in the order of their first parts.

    With `entire_model`, tensors of one dtype and bound are compressed as one.
    """
    if not entire_model:
        return [FlatView([i], [t], t) for i, t in enumerate(tensors)]
    groups: dict[object, list[int]] = {}
    for i, t in enumerate(tensors):
        groups.setdefault(i if t.uncompressed else dtype_and_bound(t), []).append(i)
    views = []
    for places in groups.values():
        members = [tensors[i] for i in places]
        is_flat = not members[0].uncompressed
        spec = _concatenated_spec(members) if is_flat else members[0]
        views.append(FlatView(places, members, spec))
    return views


def _concatenated_spec(tensors: list[TensorSpec]) -> TensorSpec:
    label = f"{len(tensors)} tensors from {tensors[0].label} on"
    size = sum(t.size for t in tensors)
    if size > tf.int32.max:
        raise ValueError(
            "Positions are sent as int32, and this method compresses all tensors as "
            f"one, so together they may have at most {tf.int32.max} entries. Use a "
            "method that compresses each tensor by itself, such as `TopK`, or exclude "
            f"some from compression. Received: {label}, with {size} entries"
        )
    return tensors[0]._replace(label=label, shape=(size,))


def _split_state(value: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    flat = tf.split(tf.reshape(value, [-1]), [s.num_elements() for s in shapes])
    return [tf.reshape(part, s) for part, s in zip(flat, shapes, strict=True)]


def _to_dense(result: Result) -> Result:
    sent, chosen = result.sent, result.chosen
    if chosen is None and isinstance(sent, SparseEntries):
        chosen = position_mask(sent)
    return result._replace(
        sum=to_dense_tensor(result.sum), sent=to_dense_tensor(sent), chosen=chosen
    )


def _count_sent(sent: tf.Tensor | SparseEntries | None) -> tf.Tensor | None:
    """Count the entries of a tensor that were sent; None for all of them."""
    if isinstance(sent, SparseEntries):
        return tf.size(sent.positions)
    if sent is None or sent.dtype != tf.bool:
        return None
    return tf.math.count_nonzero(sent, dtype=tf.int32)
