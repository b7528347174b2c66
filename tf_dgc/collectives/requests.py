"""Requests for communication, and the replies to them.

A step implementation yields lists of requests and receives as many replies. Values that
must have the same shape and dtype on all participating workers are called *uniform*.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.conditions import BoolOrTensor

Group: TypeAlias = tuple[int, ...] | None
"""Indices of the participating workers, ascending; None for all workers."""


class AllReduce(NamedTuple):
    """Request the sum of a tensor over workers.

    The reply has the same shape and dtype, and the same bits on all workers.

    Attributes:
        values: float or int32 tensor of any shape, uniform.
        group: participating workers.
    """

    values: tf.Tensor
    group: Group = None


class AllGather(NamedTuple):
    """Request the words of all workers.

    The reply is int32 `[num_workers, w]`, a row per worker, the same on all workers.

    Attributes:
        words: any data as 32-bit words, int32 `[w]`, uniform.
        group: participating workers.
    """

    words: tf.Tensor
    group: Group = None


class SendRecv(NamedTuple):
    """Exchange tensors with one other worker, which must request the same.

    The reply is the partner's tensor.

    Attributes:
        values: float, int32 or int64 tensor of any shape, uniform.
        partner: index of the other worker.
    """

    values: tf.Tensor
    partner: int


class AllToAll(NamedTuple):
    """Send one row to each worker of a group and receive one from each.

    The reply has the same shape and dtype: row i comes from the group's i-th worker.

    Attributes:
        rows: one row per worker of the group, in order, `[members, ...]`; float, int32
            or int64, uniform.
        group: participating workers.
    """

    rows: tf.Tensor
    group: Group = None


class Broadcast(NamedTuple):
    """Request the tensor of one worker of a group.

    The reply has the same shape and dtype, and the same bits on all workers.

    Attributes:
        values: float, int32 or int64 tensor of any shape, uniform; only the source's
            entries are used.
        source: index of the source among all workers.
        group: participating workers.
    """

    values: tf.Tensor
    source: int
    group: Group = None


class BufferLayout(NamedTuple):
    """Content of a sparse buffer (`codecs.buffer`).

    Attributes:
        tensors: specs of all tensors.
        counts: entries of each tensor in the buffer, ints or scalar int32 tensors.
    """

    tensors: Sequence[TensorSpec]
    counts: Sequence[int | tf.Tensor]


class DenseOrSparse(NamedTuple):
    """Request a sum or a gather; all workers must choose the same.

    The reply is a `DenseOrSparseReply`.

    Attributes:
        dense: whether to sum `vector`, else to gather `words`: a bool, or a scalar bool
            tensor if decided at run time.
        vector: values to sum, float `[n]`.
        words: words to gather, int32 `[w]`, uniform.
        entries: n, where the shapes of both are known only at run time. `words` is then
            at most as many bytes as `vector`.
        group: participating workers.
        layout: content of the words, if an algorithm may merge their entries.
        max_bytes: upper bound of the bytes of `words`, if known, where their shape is
            known only at run time.
    """

    dense: BoolOrTensor
    vector: tf.Tensor
    words: tf.Tensor
    entries: int | None = None
    group: Group = None
    layout: BufferLayout | None = None
    max_bytes: int | None = None


class Remainder(NamedTuple):
    """Sums that an algorithm dropped and that this worker adds to its residual.

    Attributes:
        positions: positions in the concatenation of all compressed tensors, ascending,
            int32 `[m]`.
        values: sums at these positions, `[m]`.
    """

    positions: tf.Tensor
    values: tf.Tensor


class DenseOrSparseReply(NamedTuple):
    """Reply to `DenseOrSparse`. The part that was not requested is empty.

    Attributes:
        total: sum of the vectors, `[n]`.
        buffers: gathered words, int32 `[num_workers, w]`, or merged words, `[1, w]`.
        delivered: whether each entry of this worker's words reached `buffers`, bool, by
            tensor and position; None if all did. Only communicators with
            `drops_entries` set it.
        remainder: dropped sums for this worker's residual; None without any.
    """

    total: tf.Tensor
    buffers: tf.Tensor
    delivered: tf.Tensor | None = None
    remainder: Remainder | None = None


TensorRequest: TypeAlias = AllReduce | AllGather
"""Request of a compressor."""

Primitive: TypeAlias = TensorRequest | SendRecv | AllToAll | Broadcast
"""Request of a collective algorithm."""

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


def group_members(request: Request, worker: int, num_workers: int) -> tuple[int, ...]:
    """Return the workers that take part in a request, ascending.

    Args:
        request: request of `worker`.
        worker: index of the requesting worker.
        num_workers: number of workers, N.

    Raises:
        ValueError: if the group is not ascending, names a worker that does not exist or
            lacks this one; if the partner, the source or the number of rows does not
            fit the group.
    """
    if isinstance(request, SendRecv):
        _check_partner(request.partner, worker, num_workers)
        low, high = sorted([worker, request.partner])
        return low, high
    group = request.group
    members = tuple(range(num_workers)) if group is None else tuple(group)
    exist = set(range(num_workers)).issuperset(members)
    if worker not in members or not exist or sorted(set(members)) != list(members):
        raise ValueError(
            "A group must name workers in ascending order, each once, and include the "
            f"requesting worker. Received: group={group} from worker {worker} of "
            f"{num_workers}"
        )
    if isinstance(request, Broadcast) and request.source not in members:
        raise ValueError(
            "A broadcast must come from a worker of the group. Received: "
            f"source={request.source}, group={list(members)}"
        )
    if isinstance(request, AllToAll) and request.rows.shape[0] != len(members):
        raise ValueError(
            f"An all-to-all needs a row for each of {len(members)} workers. Received: "
            f"rows of shape {request.rows.shape}"
        )
    return members


def _check_partner(partner: int, worker: int, num_workers: int) -> None:
    if not 0 <= partner < num_workers or partner == worker:
        raise ValueError(
            "A send-receive must be requested by both workers of a pair. Received: "
            f"worker {worker} requests one with worker {partner} of {num_workers}"
        )
