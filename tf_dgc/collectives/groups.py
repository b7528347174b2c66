"""Groups: who takes part in what is asked for, and whether that can be."""

from tf_dgc.collectives.requests import Broadcast, Message, Spread, Swap


def members_of(message: Message, worker: int, num_workers: int) -> tuple[int, ...]:
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
    if isinstance(message, Swap):
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
    if isinstance(message, Spread) and message.rows.shape[0] != len(members):
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
