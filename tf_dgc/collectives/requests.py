"""Requests of step implementations, and the replies to them.

A step implementation yields lists of requests and receives as many replies. The
requests that know nothing of compression are those of `multiworker.requests`.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.conditions import BoolOrTensor
from tf_dgc.multiworker.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Primitive,
    SendRecv,
    group_members,
)

__all__ = [
    "Aggregation",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "BufferLayout",
    "DenseOrEntries",
    "DenseOrSparse",
    "DenseOrSparseReply",
    "Primitive",
    "Remainder",
    "Reply",
    "Request",
    "Result",
    "SendRecv",
    "SparseEntries",
    "TensorRequest",
    "group_members",
    "position_mask",
    "to_dense_tensor",
]


class BufferLayout(NamedTuple):
    """Content of a sparse buffer (`codecs.buffer`)."""

    tensors: Sequence[TensorSpec]
    counts: Sequence[int | tf.Tensor]  # ints, or scalar int32 tensors


class DenseOrSparse(NamedTuple):
    """Request a sum or a gather; all workers must choose the same.

    The reply is a `DenseOrSparseReply`.

    Attributes:
        dense: whether to sum `vector`, else to gather `words`.
        vector: values to sum, float `[n]`.
        words: words to gather, int32 `[w]`, uniform.
        entries: n, where the shapes of both are known only at run time. `words` is then
            at most as many bytes as `vector`.
        group: indices of the participating workers, ascending; None for all.
        layout: content of the words, if an algorithm may merge their entries.
        max_bytes: upper bound of the bytes of `words`, if known, where their shape is
            known only at run time.
    """

    dense: BoolOrTensor
    vector: tf.Tensor
    words: tf.Tensor
    entries: int | None = None
    group: tuple[int, ...] | None = None
    layout: BufferLayout | None = None
    max_bytes: int | None = None


class Remainder(NamedTuple):
    """Sums that an algorithm dropped and that this worker adds to its residual."""

    positions: tf.Tensor  # int32 `[m]`, ascending, in all compressed tensors
    values: tf.Tensor  # `[m]`


class DenseOrSparseReply(NamedTuple):
    """Reply to `DenseOrSparse`. The part that was not requested is empty.

    Attributes:
        total: sum of the vectors, `[n]`.
        buffers: gathered words, int32 `[num_workers, w]`, or merged words, `[1, w]`.
        delivered: whether each entry of this worker's words reached `buffers`, bool, by
            tensor and position; None if all did.
        remainder: dropped sums for this worker's residual; None without any.
    """

    total: tf.Tensor
    buffers: tf.Tensor
    delivered: tf.Tensor | None = None
    remainder: Remainder | None = None


TensorRequest: TypeAlias = AllReduce | AllGather
"""Request of a compressor."""

Request: TypeAlias = Primitive | DenseOrSparse
"""Request of a step implementation."""

Reply: TypeAlias = tf.Tensor | DenseOrSparseReply


class SparseEntries(NamedTuple):
    """A flat tensor that is zero except at some positions.

    Attributes:
        positions: positions of the entries, int32 `[m]`, distinct; ascending for
            methods of the `entire_model`.
        values: values of the entries, float `[m]`.
        size: number of entries n of the tensor, zeros included.
    """

    positions: tf.Tensor
    values: tf.Tensor
    size: int


DenseOrEntries: TypeAlias = tf.Tensor | SparseEntries | list[SparseEntries]
"""A dense tensor, its nonzero entries, or several of these to be added in order."""


class Result(NamedTuple):
    """Result of exchanging one tensor.

    Attributes:
        sum: sum of all workers' contributions, `[n]` or of the tensor's shape, in its
            dtype, the same on all workers. The cost of applying `SparseEntries`, or a
            list of them to be added in order, grows with their number only.
        sent: contribution of this worker, a tensor or `SparseEntries`. With error
            feedback the optimizer keeps the rest in the residual.
        state: new values of the method's state, by name; None without state.
        entries: number of entries sent, an int or a scalar integer tensor; None if all.
        chosen: whether each entry was sent, bool, `[n]` or of the tensor's shape,
            including entries sent as 0. None if all were sent or the positions of
            `sent` say which. A `Sparsifier` sets it together with `entries`, for
            factor masking.
    """

    sum: DenseOrEntries
    sent: tf.Tensor | SparseEntries
    state: dict[str, tf.Tensor] | None = None
    entries: int | tf.Tensor | None = None
    chosen: tf.Tensor | None = None


Aggregation: TypeAlias = Generator[TensorRequest, tf.Tensor, Result]
"""Exchange of one tensor, as `Compressor.aggregate` returns it."""


def position_mask(entries: SparseEntries) -> tf.Tensor:
    """Return a bool mask `[n]` of the entries' positions."""
    ones = tf.ones_like(entries.positions)
    return tf.scatter_nd(entries.positions[:, tf.newaxis], ones, [entries.size]) > 0


def to_dense_tensor(values: DenseOrEntries) -> tf.Tensor:
    """Return a dense tensor: `[n]`, or `values` itself if it is dense."""
    if isinstance(values, tf.Tensor):
        return values
    first, *others = [values] if isinstance(values, SparseEntries) else values
    total = tf.scatter_nd(first.positions[:, tf.newaxis], first.values, [first.size])
    for entries in others:
        indices = entries.positions[:, tf.newaxis]
        total = tf.tensor_scatter_nd_add(total, indices, entries.values)
    return total
