"""Graphs of gossip: whose weights a worker averages with its own, and how much."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_dgc.arguments import show

_ROUNDING = 1e-6  # of the sums of rows and columns that are given


def ring_graph(number: int) -> list[np.ndarray]:
    """Return the weights of a ring, in which a worker has two neighbours, `[N, N]`."""
    return [_around([1], number)]


def torus_graph(number: int) -> list[np.ndarray]:
    """Return those of a grid whose ends meet, as square as there is; else of a ring."""
    height = next(h for h in range(math.isqrt(number), 0, -1) if number % h == 0)
    along, across = (_around([1], n) for n in (number // height, height))
    # A mean of both ways of one is doubly stochastic, as they are.
    eye = np.eye
    steps = np.kron(eye(height), along), np.kron(across, eye(number // height))
    return [steps[0]] if height == 1 else [(steps[0] + steps[1]) / 2]


def exponential_graph(number: int) -> list[np.ndarray]:
    """Return those of one-peer exponential graphs, one for each round in turn.

    In round r a worker averages with the one that is 2^r before it. After log2 N
    rounds all have the mean, if N is a power of two.
    """
    hops = [2**r for r in range((number - 1).bit_length())]
    eye = np.eye(number)
    return [(eye + np.roll(eye, -hop, axis=1)) / 2 for hop in hops] or [eye]


NAMED_GRAPHS = {
    "ring": ring_graph,
    "torus": torus_graph,
    "exponential": exponential_graph,
}


def mixing_weights(graph: str | np.ndarray, num_workers: int) -> list[np.ndarray]:
    """Return the weights by which workers average, of each round in turn.

    Args:
        graph: name of a graph, "ring", "torus" or "exponential"; or the weights.
        num_workers: number of workers, N; one may have any graph.

    Returns:
        Matrices, `[N, N]`, whose row i is the mean that worker i takes.

    Raises:
        ValueError: for weights of another number of workers.
    """
    if isinstance(graph, str):
        return NAMED_GRAPHS[graph](num_workers)
    if num_workers == 1:  # has nobody to meet, as when a file is looked at
        return [np.eye(1)]
    if len(graph) != num_workers:
        raise ValueError(
            "`graph` must have a row and a column for each worker. Pass one for as "
            f"many, or the name of a graph. Received: {len(graph)} rows, but there are "
            f"{num_workers} workers"
        )
    return [graph]


def _around(hops: Sequence[int], number: int) -> np.ndarray:
    """Return equal weights of a worker and of those so many before and behind."""
    eye = np.eye(number)
    linked = sum((np.roll(eye, s * h, axis=1) for h in hops for s in (1, -1)), eye) > 0
    return linked / linked.sum(axis=1, keepdims=True)


def check_mixing_matrix(given: Any) -> np.ndarray:
    """Return a matrix of weights, float64 `[N, N]`; row i is what worker i averages.

    Raises:
        ValueError: unless it is square, its entries are in [0, 1], its rows and columns
            add up to 1, and workers that average by it come to a consensus.
    """
    try:
        matrix = np.array(given, np.float64)  # a copy, which nobody else changes
    except (TypeError, ValueError):
        matrix = np.zeros(0)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(
            f"`graph` must be {' or '.join(map(repr, NAMED_GRAPHS))}, or a square "
            f"matrix of "
            "weights, one row and one column for each worker. Received: "
            f"graph={show(given)}"
        )
    if not np.all((matrix >= 0) & (matrix <= 1)):
        raise ValueError(
            "All entries of `graph` must be in [0, 1]: the share of each worker's "
            f"weights in a mean. Received: graph={show(given)}"
        )
    sums = np.concatenate([matrix.sum(axis=0), matrix.sum(axis=1)])
    if np.any(np.abs(sums - 1) > _ROUNDING):
        raise ValueError(
            "`graph` must be doubly stochastic: every row and every column must add up "
            "to 1, or the mean over all workers would not stay what it is. Received: "
            f"graph={show(given)}, with sums of columns {matrix.sum(axis=0)} and of "
            f"rows {matrix.sum(axis=1)}"
        )
    _check_consensus(matrix, given)
    return matrix


def _check_consensus(matrix: np.ndarray, given: Any) -> None:
    number = len(matrix)
    reached = np.linalg.matrix_power((matrix > 0) + np.eye(number), number) > 0
    if not reached.all():
        raise ValueError(
            "`graph` must be connected: from each worker to each other one there must "
            "be a way of weights above 0, or they never agree; worker 0 reaches "
            f"{np.flatnonzero(reached[:, 0]).tolist()} of {number} workers. Received: "
            f"graph={show(given)}"
        )
    slowest = np.abs(np.linalg.eigvals(matrix - 1 / number)).max()
    if slowest > 1 - 1e-9:
        raise ValueError(
            "`graph` must bring workers together: by this one they hand their weights "
            "around and never agree. Let each keep a share of its own, for example "
            f"`(np.eye({number}) + graph) / 2`. Received: graph={show(given)}"
        )


def matchings(matrix: np.ndarray) -> list[list[tuple[int, int]]]:
    """Return who meets whom, in rounds of pairs of which no two have one in common.

    All take the rounds in this order, so that nobody waits in a circle.

    Args:
        matrix: weights, `[N, N]`.
    """
    rounds: list[list[tuple[int, int]]] = []
    linked = (matrix > 0) | (matrix.T > 0)
    for low, high in zip(*np.nonzero(np.triu(linked, 1)), strict=True):
        pair = int(low), int(high)
        free = (r for r in rounds if not set(pair) & {m for p in r for m in p})
        found = next(free, None)
        if found is None:
            rounds.append([pair])
        else:
            found.append(pair)
    return rounds
