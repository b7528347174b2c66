"""Views: what a method sees as one tensor, and its results tensor by tensor again.

Most methods see each tensor by itself. Those that say `together` see all that are not
exempt, of one dtype, end to end as one flat tensor.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

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
    """Tensors of a step that a method sees as one.

    Attributes:
        places: places of the tensors in the step.
        tensors: their descriptions.
        seen: description of what the method sees.
    """

    places: list[int]
    tensors: list[TensorSpec]
    seen: TensorSpec

    @property
    def is_flat(self) -> bool:
        """Whether it is a method's that sees tensors together."""
        return self.seen is not self.tensors[0]

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each tensor."""
        return [t.size for t in self.tensors]

    def values(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return what is seen of the step's values, of its shape."""
        own = [tf.reshape(values[place], [-1]) for place in self.places]
        flat = tf.concat(own, axis=0) if self.is_flat else own[0]
        return tf.reshape(flat, self.seen.shape)

    def state(self, states: Sequence[dict[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Return the state of what is seen: that of all tensors, end to end."""
        own = [states[place] for place in self.places]
        if not self.is_flat:
            return own[0]
        return {
            name: tf.concat([tf.reshape(s[name], [-1]) for s in own], axis=0)
            for name in own[0]
        }

    def keys(self, keys_per_tensor: Sequence[RandomKeys]) -> RandomKeys:
        """Return the seeds, those of the first tensor."""
        first = keys_per_tensor[self.places[0]]
        return first.of_sizes(self.sizes) if self.is_flat else first

    def results(
        self, result: Result, states: Sequence[dict[str, tf.Tensor]]
    ) -> list[Result]:
        """Return the result of each tensor.

        Args:
            result: result of what is seen.
            states: states of the step's tensors, as they were before.
        """
        if not self.is_flat:
            return [result]
        if tracing.in_xla_context():  # of how many entries each has is not known
            result = _dense(result)
        sums, sent, chosen = map(self._split, (result.sum, result.sent, result.chosen))
        counted = sent if result.chosen is None else chosen
        known = [states[place] for place in self.places]
        state = {
            name: _apart(value, [s[name].shape for s in known])
            for name, value in (result.state or {}).items()
            if name in known[0]
        }
        return [
            Result(
                sums[i],
                sent[i],
                {name: parts[i] for name, parts in state.items()},
                None if result.entries is None else _count(counted[i]),
                chosen[i],
            )
            for i in range(len(self.tensors))
        ]

    def _split(self, values: DenseOrEntries | None) -> list:
        if values is None:
            return [None] * len(self.tensors)
        if isinstance(values, list):
            return list(map(list, zip(*map(self._split, values), strict=True)))
        if isinstance(values, SparseEntries):
            return self._split_entries(values)
        return tf.split(tf.reshape(values, [-1]), self.sizes)

    def _split_entries(self, given: SparseEntries) -> list[SparseEntries]:
        ends = list(itertools.accumulate(self.sizes))
        before = tf.searchsorted(given.positions, ends)
        counts = before - tf.concat([[0], before[:-1]], axis=0)
        number = len(ends)
        positions = tf.split(given.positions, counts, num=number)
        values = tf.split(given.values, counts, num=number)
        return [
            SparseEntries(at - (end - size), found, size)
            for at, found, end, size in zip(
                positions, values, ends, self.sizes, strict=True
            )
        ]


def dtype_and_bound(tensor: TensorSpec) -> tuple[tf.DType, tf.DType | None]:
    """Return what tensors that are seen as one have in common: dtype and bound."""
    return tensor.dtype, tensor.narrow


def flat_views(tensors: Sequence[TensorSpec], together: bool) -> list[FlatView]:
    """Return what a method sees, in the order of the first tensor of each.

    Args:
        tensors: descriptions of all tensors of the step.
        together: whether the method sees those that are not exempt as one. As wide or
            narrow as each other, that is: what is seen has one `width`.

    Raises:
        ValueError: if what is seen as one has more entries than positions, int32, are.
    """
    groups: dict[object, list[int]] = {}
    for place, t in enumerate(tensors):
        seen_with = dtype_and_bound(t) if together and not t.uncompressed else place
        groups.setdefault(seen_with, []).append(place)
    return [
        _view([tensors[place] for place in places], places, not isinstance(key, int))
        for key, places in groups.items()
    ]


def _view(tensors: list[TensorSpec], places: list[int], flat: bool) -> FlatView:
    first = tensors[0]
    if not flat:
        return FlatView(places, tensors, first)
    label = f"{len(tensors)} tensors from {first.label} on"
    size = sum(t.size for t in tensors)
    if size > tf.int32.max:
        raise ValueError(
            "Positions are sent as int32, and this method sees all tensors that are "
            f"not exempt as one, so together they may have at most {tf.int32.max} "
            "entries. Use a method that sees each by itself, as `TopK`, or exclude "
            f"some from compression. Received: {label}, with {size} entries"
        )
    return FlatView(places, tensors, first._replace(label=label, shape=(size,)))


def _apart(value: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Return the parts, of these shapes, of which a state is the end to end."""
    parts = tf.split(tf.reshape(value, [-1]), [s.num_elements() for s in shapes])
    return [tf.reshape(part, s) for part, s in zip(parts, shapes, strict=True)]


def _dense(result: Result) -> Result:
    sent, chosen = result.sent, result.chosen
    if chosen is None and isinstance(sent, SparseEntries):
        chosen = position_mask(sent)
    return result._replace(
        sum=to_dense_tensor(result.sum), sent=to_dense_tensor(sent), chosen=chosen
    )


def _count(sent: tf.Tensor | SparseEntries | None) -> tf.Tensor | None:
    """Return how many entries of a tensor went out; None for all.

    Args:
        sent: entries that went out; or whether each did, bool `[n]`.
    """
    if isinstance(sent, SparseEntries):
        return tf.size(sent.positions)
    if sent is None or sent.dtype != tf.bool:
        return None
    return tf.math.count_nonzero(sent, dtype=tf.int32)
