"""What an exchange takes, in seconds, by a few numbers of links and processors."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tf_dgc.arguments import show
from tf_dgc.exchanges.base import Cost, Exchange

_AS_FAST = 1.05  # times of the fastest: the model does not tell such apart


class Links(NamedTuple):
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


class Asked(NamedTuple):
    """One thing that a step asks for.

    Attributes:
        kind: "sum", "gather" (of words), or "entries" (words that may be merged).
        num_bytes: number of bytes of one worker.
    """

    kind: str
    num_bytes: float


def cost_of(exchange: Exchange, asked: Asked, num_workers: int) -> Cost:
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


def on_the_way(cost: Cost, links: Links) -> float:
    """Return the seconds from the start to the end, merges on the way included."""
    rounds = max(cost.rounds, cost.collectives)
    waits = cost.collectives * links.launch + rounds * links.latency
    return waits + cost.path * links.per_byte + cost.merged * links.merging


def predict(
    exchange: Exchange, asked: Iterable[Asked], num_workers: int, links: Links
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
    if exchange.is_near:
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
        seconds += on_the_way(cost_of(exchange, request, num_workers), links)
        merged = request.kind == "entries" and exchange.drops_entries
        seconds += (1 if merged else num_workers) * decoding(request, links)
    return seconds


def decoding(asked: Asked, links: Links) -> float:
    """Return the seconds that it takes to decode what one worker sent.

    Args:
        asked: request of every worker.
        links: numbers of links and processors.
    """
    per_byte = {"sum": 0.0, "gather": links.rounding, "entries": links.decoding}
    return asked.num_bytes * per_byte[asked.kind]


def as_fast_as_any(seconds: Sequence[float]) -> int:
    """Return the index of the first that takes at most 5 % more than the least.

    Args:
        seconds: seconds of each, in the order of preference.
    """
    enough = _AS_FAST * min(seconds)
    return next(i for i, taken in enumerate(seconds) if taken <= enough)
