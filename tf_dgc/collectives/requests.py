"""Requests: what a step asks of the communicator, and what it gets."""

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.smart_cond import BoolOrTensor

Group: TypeAlias = tuple[int, ...] | None
"""Indices of the workers that take part, ascending; None for all."""


class AllReduce(NamedTuple):
    """Ask for the sum over workers of a float or int32 tensor, by all-reduce.

    The reply has the same shape and dtype, and the same bits on all of them.

    Attributes:
        values: float or int32 tensor of any shape, equal on all workers.
        group: workers that take part.
    """

    values: tf.Tensor
    group: Group = None


class AllGather(NamedTuple):
    """Ask for every worker's words.

    The reply is int32 `[num_workers, w]`, by worker, the same on all of them.

    Attributes:
        words: bits of anything, int32 `[w]`, w equal on all workers.
        group: workers that take part.
    """

    words: tf.Tensor
    group: Group = None


class SendRecv(NamedTuple):
    """Ask for what one other worker has, which asks for this one's.

    The reply has the same shape and dtype, and differs from worker to worker.

    Attributes:
        values: tensor of any shape, equal on both workers, float, int32 or int64.
        partner: index of the other worker.
    """

    values: tf.Tensor
    partner: int


class AllToAll(NamedTuple):
    """Ask for what every worker has for this one (all-to-all).

    The reply has the same shape and dtype: row i is what the i-th worker of the group
    had for this one. It differs from worker to worker.

    Attributes:
        rows: a row for each worker of the group, in order, `[members, ...]`; shape and
            dtype as in `Swap`.
        group: workers that take part.
    """

    rows: tf.Tensor
    group: Group = None


class Broadcast(NamedTuple):
    """Ask for what one worker of a group has.

    The reply has the same shape and dtype, and the same bits on all of them.

    Attributes:
        values: tensor of any shape, equal on all workers, dtype as in `Swap`; its
            entries are read where it comes from.
        source: index among all of the worker it comes from.
        group: workers that take part.
    """

    values: tf.Tensor
    source: int
    group: Group = None


class BufferLayout(NamedTuple):
    """How words are a buffer of entries (`codecs.wire`), for who merges them.

    Attributes:
        layout: sizes and value types of all tensors.
        counts: entries of each, ints or scalar int32 tensors.
    """

    layout: Sequence[TensorSpec]
    counts: Sequence[int | tf.Tensor]


class DenseOrSparse(NamedTuple):
    """Ask for one of two, as all workers alike have decided; the reply is `Both`.

    Attributes:
        dense: whether `vector` is to be summed, else `words` gathered; a bool, or a
            scalar bool tensor that is decided at run time.
        vector: values to be summed, float `[n]`.
        words: words to be gathered, int32 `[w]`, w equal on all workers.
        entries: length n, where the graph computes the shapes of both; `words` has no
            more bytes than `vector` then.
        group: workers that take part.
        form: form of the words, if their entries may be merged on the way.
        most_bytes: bytes of `words` at the most, where the graph computes its shape, if
            that is known.
    """

    dense: BoolOrTensor
    vector: tf.Tensor
    words: tf.Tensor
    entries: int | None = None
    group: Group = None
    form: BufferLayout | None = None
    most_bytes: int | None = None


class Remainder(NamedTuple):
    """What stays with a worker of the sums that it formed on the way.

    Attributes:
        places: places of the entries in all tensors that are not exempt, one behind the
            other: ascending, int32 `[m]`.
        values: values there, `[m]`.
    """

    places: tf.Tensor
    values: tf.Tensor


class DenseOrSparseReply(NamedTuple):
    """Reply to `Either`; what was not asked for is empty.

    Attributes:
        total: sum of the vectors, `[n]`.
        buffers: gathered words, int32 `[num_workers, w]`; merged ones, `[1, w]`.
        delivered: whether each entry that this worker's words hold is still in
            `buffers`, bool, tensor after tensor; None if all are. Communicators that
            leave some out on the way say `drops_entries`.
        left: sums that are not in `buffers`, for this worker's residual; None if there
            are none.
    """

    total: tf.Tensor
    buffers: tf.Tensor
    delivered: tf.Tensor | None = None
    left: Remainder | None = None


Request: TypeAlias = AllReduce | AllGather
Primitive: TypeAlias = Request | SendRecv | AllToAll | Broadcast
Message: TypeAlias = Primitive | DenseOrSparse
Reply: TypeAlias = tf.Tensor | DenseOrSparseReply


class SparseEntries(NamedTuple):
    """A flat tensor that is 0 but at some positions.

    Attributes:
        positions: positions of what is not 0, each once, int32 `[m]`; ascending where a
            method sees tensors together.
        values: values there, float `[m]`.
        size: number of entries n of the tensor.
    """

    positions: tf.Tensor
    values: tf.Tensor
    size: int


DenseOrEntries: TypeAlias = tf.Tensor | SparseEntries | list[SparseEntries]
"""A tensor; its entries that are not 0; or several of these, added up in order."""


class Result(NamedTuple):
    """What an exchange of one tensor comes to.

    Attributes:
        sum: sum of what all workers contributed, `[n]` or of the tensor's shape, in its
            dtype; equal on all workers. `Entries`, or a list of them to be added up in
            order, cost as much as there are.
        sent: contribution of this worker to it, likewise: a tensor or `Entries`. With
            error feedback, the optimizer keeps the rest in `residual`.
        state: new values of the method's state, by name; None if it has none.
        entries: number of entries that went out, an int or a scalar integer tensor;
            None if all.
        chosen: whether each entry went out, bool, `[n]` or of the tensor's shape, also
            where its value is coded as 0; None if all did, or the positions of `sent`
            say it. Methods of the kind "sparsification" say so with `entries`, for
            factor masking.
    """

    sum: DenseOrEntries
    sent: tf.Tensor | SparseEntries
    state: dict[str, tf.Tensor] | None = None
    entries: int | tf.Tensor | None = None
    chosen: tf.Tensor | None = None


def position_mask(entries: SparseEntries) -> tf.Tensor:
    """Return whether each entry is at one of the positions, bool `[n]`."""
    ones = tf.ones_like(entries.positions)
    return tf.scatter_nd(entries.positions[:, tf.newaxis], ones, [entries.size]) > 0


def to_dense_tensor(values: DenseOrEntries) -> tf.Tensor:
    """Return all entries, as a tensor: `[n]`, or of the shape that it has already."""
    if isinstance(values, tf.Tensor):
        return values
    first, *others = [values] if isinstance(values, SparseEntries) else values
    total = tf.scatter_nd(first.positions[:, tf.newaxis], first.values, [first.size])
    for more in others:
        at = more.positions[:, tf.newaxis]
        total = tf.tensor_scatter_nd_add(total, at, more.values)
    return total


Aggregation: TypeAlias = Generator[Request, tf.Tensor, Result]


# --- Groups: who takes part in what is asked for, and whether that can be.


def group_members(message: Message, worker: int, num_workers: int) -> tuple[int, ...]:
    """Return the workers that take part in what one of them asks for, ascending.

    Args:
        message: request of that worker.
        worker: its index among all.
        num_workers: number of workers, N.

    Raises:
        ValueError: for groups without it, that are not ascending or name a worker that
            there is not; for a swap with itself or nobody; for a source outside of the
            group, and rows that are not one for each worker.
    """
    if isinstance(message, SendRecv):
        _check_partner(message.partner, worker, num_workers)
        low, high = sorted([worker, message.partner])
        return low, high
    group = message.group
    members = tuple(range(num_workers)) if group is None else tuple(group)
    known = set(range(num_workers)).issuperset(members)
    if worker not in members or not known or sorted(set(members)) != list(members):
        raise ValueError(
            "A group must name workers in ascending order, each once, the one that "
            f"asks among them. Received: group={group} of worker {worker} of "
            f"{num_workers}"
        )
    if isinstance(message, Broadcast) and message.source not in members:
        raise ValueError(
            "What is broadcast must come from a worker of the group. Received: "
            f"source={message.source}, workers {list(members)}"
        )
    if isinstance(message, AllToAll) and message.rows.shape[0] != len(members):
        raise ValueError(
            f"There must be a row for each of {len(members)} workers. Received: rows "
            f"of shape {message.rows.shape}"
        )
    return members


def _check_partner(partner: int, worker: int, num_workers: int) -> None:
    if not 0 <= partner < num_workers or partner == worker:
        raise ValueError(
            "A swap must be asked for by both workers of a pair. Received: worker "
            f"{worker} asks for worker {partner} of {num_workers}"
        )
