"""Predicts the seconds of a collective algorithm from measured speeds."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tf_dgc.arguments import show
from tf_dgc.collectives.algorithm import CollectiveAlgorithm, Cost

EQUALLY_FAST = 1.05  # the model is not precise enough to rank times within this factor


class LinkSpeeds(NamedTuple):
    """Speeds of links and processors, measured or assumed.

    Attributes:
        launch: seconds of a collective in addition to its rounds.
        latency: seconds of a round, whatever it carries.
        per_byte: seconds per byte on a link.
        merging: seconds per byte of sparse buffers to merge them.
        decoding: seconds per byte of sparse buffers to decode them.
        rounding: seconds per byte of a float16 vector to round it from float32, add to
            it and widen it again; decoding quantized values takes about as long.
        start: seconds of a step's exchange that do not depend on its requests.
    """

    launch: float
    latency: float
    per_byte: float
    merging: float = 0.0
    decoding: float = 0.0
    rounding: float = 0.0
    start: float = 0.0


class RequestSize(NamedTuple):
    """Size of one request of a step.

    Attributes:
        kind: "sum", "gather" (of words), or "entries" (words that may be merged).
        num_bytes: bytes of one worker.
    """

    kind: str
    num_bytes: float


def request_cost(
    algorithm: CollectiveAlgorithm, request: RequestSize, num_workers: int
) -> Cost:
    """Return the cost of a request that every worker makes."""
    if request.kind == "sum":
        return algorithm.cost_of_sum(request.num_bytes, num_workers)
    if request.kind == "entries" and algorithm.drops_entries:
        return algorithm.cost_of_merge(request.num_bytes, num_workers)
    return algorithm.cost_of_gather(request.num_bytes, num_workers)


def transfer_seconds(cost: Cost, links: LinkSpeeds) -> float:
    """Return the seconds of a request, merging included."""
    rounds = max(cost.rounds, cost.collectives)
    waits = cost.collectives * links.launch + rounds * links.latency
    return waits + cost.path * links.per_byte + cost.merged * links.merging


def predict_seconds(
    algorithm: CollectiveAlgorithm,
    requests: Iterable[RequestSize],
    num_workers: int,
    links: LinkSpeeds,
) -> float:
    """Return the seconds of a step's requests, one after the other, with decoding.

    Args:
        algorithm: collective algorithm, for `num_workers` workers.
        requests: requests of every worker.
        num_workers: number of workers, N.
        links: speeds of links and processors.

    Raises:
        ValueError: for a neighbor exchange, which has no such requests.
    """
    if algorithm.is_neighbor_exchange:
        raise ValueError(
            "`collective` must be one by which all workers come to a sum. Workers that "
            "gossip send one message to each neighbor in turn, see "
            "`collective.neighbors`; pass `Ring()` for the sums over all workers. "
            f"Received: collective={show(algorithm)}"
        )
    if num_workers == 1:
        return 0.0
    seconds = links.start
    for request in requests:
        seconds += transfer_seconds(
            request_cost(algorithm, request, num_workers), links
        )
        merged = request.kind == "entries" and algorithm.drops_entries
        seconds += (1 if merged else num_workers) * decode_seconds(request, links)
    return seconds


def decode_seconds(request: RequestSize, links: LinkSpeeds) -> float:
    """Return the seconds to decode one worker's reply."""
    per_byte = {"sum": 0.0, "gather": links.rounding, "entries": links.decoding}
    return request.num_bytes * per_byte[request.kind]


def first_of_the_fastest(seconds: Sequence[float]) -> int:
    """Return the index of the first time that is within 5 % of the least."""
    limit = EQUALLY_FAST * min(seconds)
    return next(i for i, time in enumerate(seconds) if time <= limit)


# Buckets: which tensors are exchanged together while the backward pass continues.


class TransferTimes(NamedTuple):
    """Seconds to exchange the tensors of a model.

    Attributes:
        startup: seconds per bucket, whatever it contains.
        tensors: additional seconds of each tensor, in the order in which the backward
            pass finishes them.
    """

    startup: float
    tensors: Sequence[float]

    @property
    def alone(self) -> float:
        """Seconds to exchange all tensors in one bucket."""
        return self.startup + sum(self.tensors)


def transfer_times(
    algorithm: CollectiveAlgorithm,
    requests_by_tensor: Sequence[Sequence[RequestSize]],
    joint_requests: Sequence[RequestSize],
    num_workers: int,
    links: LinkSpeeds,
) -> TransferTimes:
    """Return transfer times by the model of `predict_seconds`."""

    def seconds(requests: Sequence[RequestSize]) -> float:
        return predict_seconds(algorithm, requests, num_workers, links) - links.start

    def startup(requests: Sequence[RequestSize]) -> float:
        return seconds([request._replace(num_bytes=0) for request in requests])

    tensors = [seconds(each) - startup(each) for each in requests_by_tensor]
    return TransferTimes(startup(joint_requests), tensors)


def plan_buckets(ready: Sequence[float], costs: TransferTimes) -> list[list[int]]:
    """Return the buckets with which the exchange of all tensors ends earliest.

    The model is that of MG-WFBP (Shi et al., INFOCOM 2019): a bucket is sent when its
    last gradient is ready and the bucket before has arrived. MG-WFBP decides tensor by
    tensor; this finds the optimum by dynamic programming. Among equal plans it chooses
    the one with the smaller last buckets.

    Args:
        ready: seconds from the start of the backward pass until each tensor's gradient
            is ready, ascending.
        costs: transfer times.

    Returns:
        Buckets in the order in which they are sent, as indices into `ready`.
    """
    ends = [0.0]  # ends[m]: earliest end of the exchange of the first m tensors
    begins = [0]  # begins[m]: first tensor of the last bucket of that plan
    for number, ready_at in enumerate(ready, start=1):
        transfer, best = costs.startup, (math.inf, 0)
        for begin in reversed(range(number)):
            transfer += costs.tensors[begin]
            best = min(best, (max(ends[begin], ready_at) + transfer, -begin))
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
    """Return when the last bucket has arrived, in seconds from the start."""
    free = 0.0
    for bucket in buckets:
        begin = max(free, *(ready[i] for i in bucket))
        free = begin + costs.startup + sum(costs.tensors[i] for i in bucket)
    return free
