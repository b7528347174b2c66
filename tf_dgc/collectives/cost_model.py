"""What an exchange takes, in seconds, by a few numbers of links and processors."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tf_dgc.arguments import show
from tf_dgc.collectives.algorithm import CollectiveAlgorithm, Cost

_AS_FAST = 1.05  # times of the fastest: the model does not tell such apart


class LinkSpeeds(NamedTuple):
    """Links and processors, as measured or assumed.

    Attributes:
        launch: seconds that a collective takes beside its rounds.
        latency: seconds of a round, whatever it carries.
        per_byte: seconds per byte on a link.
        merging: seconds per byte of buffers of entries that are merged.
        decoding: seconds per byte of buffers of entries that are decoded.
        rounding: seconds per byte of a float16 vector that is made of float32, added to
            and made float32 again; coded values of all entries take about as long.
        start: seconds that a step's exchange takes, whatever it asks for.
    """

    launch: float
    latency: float
    per_byte: float
    merging: float = 0.0
    decoding: float = 0.0
    rounding: float = 0.0
    start: float = 0.0


class RequestSize(NamedTuple):
    """One thing that a step asks for.

    Attributes:
        kind: "sum", "gather" (of words), or "entries" (words that may be merged).
        num_bytes: number of bytes of one worker.
    """

    kind: str
    num_bytes: float


def request_cost(
    exchange: CollectiveAlgorithm, asked: RequestSize, num_workers: int
) -> Cost:
    """Return what an exchange says that it costs.

    Args:
        exchange: exchange, for `num_workers`.
        asked: request of every worker.
        num_workers: number of workers, N.
    """
    if asked.kind == "sum":
        return exchange.cost_of_sum(asked.num_bytes, num_workers)
    if asked.kind == "entries" and exchange.drops_entries:
        return exchange.cost_of_merge(asked.num_bytes, num_workers)
    return exchange.cost_of_gather(asked.num_bytes, num_workers)


def transfer_seconds(cost: Cost, links: LinkSpeeds) -> float:
    """Return the seconds from the start to the end, merges on the way included."""
    rounds = max(cost.rounds, cost.collectives)
    waits = cost.collectives * links.launch + rounds * links.latency
    return waits + cost.path * links.per_byte + cost.merged * links.merging


def predict_seconds(
    exchange: CollectiveAlgorithm,
    asked: Iterable[RequestSize],
    num_workers: int,
    links: LinkSpeeds,
) -> float:
    """Return the seconds that a step takes for all it asks for, one after the other.

    Args:
        exchange: exchange, for `num_workers`.
        asked: requests of every worker.
        num_workers: number of workers, N.
        links: numbers of links and processors.

    Raises:
        ValueError: for an exchange with neighbours alone, which is of no such requests.
    """
    if exchange.is_neighbor_exchange:
        raise ValueError(
            "`exchange` must be one by which all workers come to a sum. Workers that "
            "gossip send one message to each neighbour in turn, by "
            "`exchange.neighbours`; pass `Ring()` for what all of them sum besides. "
            f"Received: exchange={show(exchange)}"
        )
    if num_workers == 1:
        return 0.0
    seconds = links.start
    for request in asked:
        seconds += transfer_seconds(request_cost(exchange, request, num_workers), links)
        merged = request.kind == "entries" and exchange.drops_entries
        seconds += (1 if merged else num_workers) * decode_seconds(request, links)
    return seconds


def decode_seconds(asked: RequestSize, links: LinkSpeeds) -> float:
    """Return the seconds that it takes to decode what one worker sent.

    Args:
        asked: request of every worker.
        links: numbers of links and processors.
    """
    per_byte = {"sum": 0.0, "gather": links.rounding, "entries": links.decoding}
    return asked.num_bytes * per_byte[asked.kind]


def first_of_the_fastest(seconds: Sequence[float]) -> int:
    """Return the index of the first that takes at most 5 % more than the least.

    Args:
        seconds: seconds of each, in the order of preference.
    """
    enough = _AS_FAST * min(seconds)
    return next(i for i, taken in enumerate(seconds) if taken <= enough)


# --- Overlap: which tensors are exchanged together while the backward pass goes on.


class TransferTimes(NamedTuple):
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


def transfer_times(
    exchange: CollectiveAlgorithm,
    asked: Sequence[Sequence[RequestSize]],
    whole: Sequence[RequestSize],
    num_workers: int,
    links: LinkSpeeds,
) -> TransferTimes:
    """Return what an exchange takes, by the model of `predict`.

    Args:
        exchange: exchange, for `num_workers`.
        asked: requests for each tensor by itself.
        whole: requests for all of them together.
        num_workers: number of workers, N.
        links: numbers of links and processors.
    """

    def seconds(requests: Sequence[RequestSize]) -> float:
        return predict_seconds(exchange, requests, num_workers, links) - links.start

    def empty(requests: Sequence[RequestSize]) -> list[RequestSize]:
        return [request._replace(num_bytes=0) for request in requests]

    each = [seconds(some) - seconds(empty(some)) for some in asked]
    return TransferTimes(seconds(empty(whole)), each)


def plan_buckets(ready: Sequence[float], costs: TransferTimes) -> list[list[int]]:
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


def finish_time(
    ready: Sequence[float], buckets: Sequence[Sequence[int]], costs: TransferTimes
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


def _seconds(bucket: Sequence[int], costs: TransferTimes) -> float:
    return costs.startup + sum(costs.tensors[i] for i in bucket)
