"""Overlap: which tensors are exchanged together while the backward pass goes on."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tf_dgc.exchanges.base import Exchange
from tf_dgc.exchanges.model import Asked, Links, predict


class Transfer(NamedTuple):
    """What exchanging takes of some tensors, in seconds.

    Attributes:
        startup: seconds that every bucket takes, however little is in it.
        tensors: seconds that each tensor takes beside, in the order in which the
            backward pass finishes them.
    """

    startup: float
    tensors: Sequence[float]

    @property
    def alone(self) -> float:
        """Seconds for everything at once."""
        return self.startup + sum(self.tensors)


def transfer(
    exchange: Exchange,
    asked: Sequence[Sequence[Asked]],
    whole: Sequence[Asked],
    num_workers: int,
    links: Links,
) -> Transfer:
    """Return what an exchange takes, by the model of `predict`.

    Args:
        exchange: exchange, for `num_workers`.
        asked: requests for each tensor by itself.
        whole: requests for all of them together.
        num_workers: number of workers, N.
        links: numbers of links and processors.
    """

    def seconds(requests: Sequence[Asked]) -> float:
        return predict(exchange, requests, num_workers, links) - links.start

    def empty(requests: Sequence[Asked]) -> list[Asked]:
        return [request._replace(num_bytes=0) for request in requests]

    each = [seconds(some) - seconds(empty(some)) for some in asked]
    return Transfer(seconds(empty(whole)), each)


def merge(ready: Sequence[float], costs: Transfer) -> list[list[int]]:
    """Return which tensors go together, and in which order, so that all ends first.

    The model is that of MG-WFBP (Shi et al., INFOCOM 2019): a bucket goes when its last
    gradient is there and the bucket before has arrived. Their rule decides about one
    tensor after the other; here the best of all ways is found, by dynamic programming,
    and of equal ones that of the smaller last buckets.

    Args:
        ready: seconds from the beginning of the backward pass until each tensor's
            gradient is there, ascending.
        costs: seconds that exchanging takes.

    Returns:
        Buckets in the order of their exchange, of places in `ready`.
    """
    ends = [0.0]  # of the first tensors, as many as the index
    begins = [0]  # of the last bucket of these
    for number, seconds in enumerate(ready, start=1):
        taken, best = costs.startup, (math.inf, 0)
        for begin in reversed(range(number)):
            taken += costs.tensors[begin]
            best = min(best, (max(ends[begin], seconds) + taken, -begin))
        ends.append(best[0])
        begins.append(-best[1])
    buckets: list[list[int]] = []
    end = len(ready)
    while end:
        buckets.append(list(range(begins[end], end)))
        end = begins[end]
    return buckets[::-1]


def finish(
    ready: Sequence[float], buckets: Sequence[Sequence[int]], costs: Transfer
) -> float:
    """Return when everything is exchanged, in seconds from the beginning.

    Args:
        ready: seconds until each tensor's gradient is there.
        buckets: places of the tensors that go together.
        costs: seconds that exchanging takes.
    """
    free = 0.0
    for bucket in buckets:
        begin = max(free, *(ready[i] for i in bucket))
        free = begin + _seconds(bucket, costs)
    return free


def _seconds(bucket: Sequence[int], costs: Transfer) -> float:
    return costs.startup + sum(costs.tensors[i] for i in bucket)
