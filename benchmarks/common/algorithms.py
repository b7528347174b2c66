"""Collective algorithms by the names that the benchmarks use."""

from tf_dgc import collectives
from tf_dgc.collectives import RequestSize, cost_model

METHODS = ["float16", "scale_com"]
"""Of steps that sum around the ring: everything, or what one worker chooses."""


def create_algorithm(name, num_workers):
    """Return an exchange: `star N` has N servers, `star all` as many as workers."""
    if name.startswith("star "):
        shards = name.removeprefix("star ")
        return collectives.Star(num_workers if shards == "all" else int(shards))
    return collectives.get(name)


def drops_entries(name, num_workers):
    """Return whether an exchange merges entries on the way."""
    return create_algorithm(name, num_workers).drops_entries


def cost_of_step(name, stated, num_bytes, num_workers):
    """Return what the exchange of a step costs, in which entries are sent.

    Args:
        name: of the exchange, of `METHODS`, or "auto".
        stated: what the optimizer says that it goes by.
        num_bytes: bytes that a worker hands over.
        num_workers: number of workers, N.
    """
    *dense, exchange = stated.split(", ")
    if name != "auto":
        dense, exchange = name in METHODS, "ring" if name in METHODS else name
    elif exchange == "star":  # the one of which it chooses
        exchange = "star all"
    request_size = RequestSize("sum" if dense else "entries", num_bytes)
    return cost_model.request_cost(
        create_algorithm(exchange, num_workers), request_size, num_workers
    )


def overlapped(algorithm, overlap):
    """Return the argument `collective` of an optimizer.

    Args:
        algorithm: a collective algorithm, or its name.
        overlap: False for steps that never overlap, None for the algorithm's default,
            True for steps that do, or the seconds that a backward pass takes.
    """
    if overlap is None:
        return algorithm
    if overlap is False:
        return collectives.Auto(overlap=False) if algorithm == "auto" else algorithm
    return collectives.Overlapped(algorithm, None if overlap is True else overlap)
