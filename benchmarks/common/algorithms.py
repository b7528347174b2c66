"""Collective algorithms by the names that the benchmarks use."""

from tf_dgc import collectives
from tf_dgc.collectives import RequestSize, cost_model

METHODS = ["float16", "scale_com"]
"""Methods that sum around the ring: all entries, or those that one worker chooses."""


def create_algorithm(name, num_workers):
    """Create an algorithm; `star N` has N servers, `star all` one per worker."""
    if name.startswith("star "):
        shards = name.removeprefix("star ")
        return collectives.Star(num_workers if shards == "all" else int(shards))
    return collectives.get(name)


def drops_entries(name, num_workers):
    """Whether an algorithm merges entries on the way."""
    return create_algorithm(name, num_workers).drops_entries


def cost_of_step(name, stated, num_bytes, num_workers):
    """Return the cost of the collective of a step that sends entries.

    Args:
        name: name of an algorithm, of `METHODS`, or "auto".
        stated: algorithm that the optimizer's stats report.
        num_bytes: bytes that a worker hands over.
        num_workers: number of workers, N.
    """
    if name == "auto":
        *prefix, algorithm = stated.split(", ")
        is_sum = bool(prefix)
        if algorithm == "star":  # "auto" chooses among stars with all workers
            algorithm = "star all"
    else:
        is_sum = name in METHODS
        algorithm = "ring" if is_sum else name
    request_size = RequestSize("sum" if is_sum else "entries", num_bytes)
    return cost_model.request_cost(
        create_algorithm(algorithm, num_workers), request_size, num_workers
    )


def overlapped(algorithm, overlap):
    """Return the argument `collective` of an optimizer.

    Args:
        algorithm: a collective algorithm, or its name.
        overlap: False for steps that never overlap, None for the algorithm's default,
            True for overlapping steps, or the seconds of a backward pass.
    """
    if overlap is None:
        return algorithm
    if overlap is False:
        return collectives.Auto(overlap=False) if algorithm == "auto" else algorithm
    return collectives.Overlapped(algorithm, None if overlap is True else overlap)
