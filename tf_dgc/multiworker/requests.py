"""Requests for communication between workers.

Values that must have the same shape and dtype on all participating workers are called
*uniform*.
"""

from typing import NamedTuple, TypeAlias

import tensorflow as tf


class AllReduce(NamedTuple):
    """Request the sum of a tensor over workers.

    The reply has the same shape and dtype, and the same bits on all workers.

    Attributes:
        values: float or int32 tensor of any shape, uniform.
        group: indices of the participating workers, ascending; None for all.
    """

    values: tf.Tensor
    group: tuple[int, ...] | None = None


class AllGather(NamedTuple):
    """Request the words of all workers.

    The reply is int32 `[num_workers, w]`, a row per worker, the same on all workers.

    Attributes:
        words: any data as 32-bit words, int32 `[w]`, uniform.
        group: indices of the participating workers, ascending; None for all.
    """

    words: tf.Tensor
    group: tuple[int, ...] | None = None


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
        group: indices of the participating workers, ascending; None for all.
    """

    rows: tf.Tensor
    group: tuple[int, ...] | None = None


class Broadcast(NamedTuple):
    """Request the tensor of one worker of a group.

    The reply has the same shape and dtype, and the same bits on all workers.

    Attributes:
        values: float, int32 or int64 tensor of any shape, uniform; only the source's
            entries are used.
        source: index of the source among all workers.
        group: indices of the participating workers, ascending; None for all.
    """

    values: tf.Tensor
    source: int
    group: tuple[int, ...] | None = None


Primitive: TypeAlias = AllReduce | AllGather | SendRecv | AllToAll | Broadcast
"""Request that one collective, or one per chunk, answers."""


def group_members(request: Primitive, worker: int, num_workers: int) -> tuple[int, ...]:
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
