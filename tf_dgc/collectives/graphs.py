"""Graphs of gossip: the weights with which workers average."""

import math
from typing import Any, TypeAlias

import numpy as np

from tf_dgc.arguments import show

Matrix: TypeAlias = np.ndarray[Any, np.dtype[np.floating[Any]]]

_ROUNDING = 1e-6  # tolerance of the sums of a given matrix's rows and columns


def ring_graph(number: int) -> list[Matrix]:
    """Return the weights of a ring, in which a worker has two neighbors, `[N, N]`."""
    return [_ring(number)]


def torus_graph(number: int) -> list[Matrix]:
    """Return the weights of a torus, as square as N allows; of a ring for prime N."""
    height = next(h for h in range(math.isqrt(number), 0, -1) if number % h == 0)
    width = number // height
    along = np.kron(np.eye(height), _ring(width))
    if height == 1:
        return [along]
    across = np.kron(_ring(height), np.eye(width))
    return [(along + across) / 2]  # doubly stochastic, as both are


def exponential_graph(number: int) -> list[Matrix]:
    """Return the weights of the one-peer exponential graph, for each phase.

    In phase r a worker averages with the worker 2^r before it. If N is a power of two,
    all workers have the mean after log2 N rounds.
    """
    hops = [2**r for r in range((number - 1).bit_length())]
    eye = np.eye(number)
    return [(eye + np.roll(eye, -hop, axis=1)) / 2 for hop in hops] or [eye]


NAMED_GRAPHS = {
    "ring": ring_graph,
    "torus": torus_graph,
    "exponential": exponential_graph,
}


def mixing_weights(graph: str | Matrix, num_workers: int) -> list[Matrix]:
    """Return the weights with which workers average, for each phase.

    Args:
        graph: name of a graph, "ring", "torus" or "exponential"; or a matrix.
        num_workers: number of workers, N; a single worker may have any graph.

    Returns:
        Matrices `[N, N]`, whose row i holds the weights of worker i's mean.

    Raises:
        ValueError: if the matrix is for another number of workers.
    """
    if isinstance(graph, str):
        return NAMED_GRAPHS[graph](num_workers)
    if num_workers == 1:  # as when a checkpoint is inspected
        return [np.eye(1)]
    if len(graph) != num_workers:
        raise ValueError(
            "`graph` must have a row and a column for each worker. Pass a matrix of "
            f"that size, or the name of a graph. Received: {len(graph)} rows, but "
            f"there are {num_workers} workers"
        )
    return [graph]


def check_mixing_matrix(graph: Any) -> Matrix:
    """Return a copy of a matrix of mixing weights, float64 `[N, N]`.

    Raises:
        ValueError: unless it is square, its entries are in [0, 1], its rows and columns
            add up to 1, and repeated averaging reaches a consensus.
    """
    try:
        matrix = np.array(graph, np.float64)
    except (TypeError, ValueError):
        matrix = np.zeros(0)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(
            f"`graph` must be {' or '.join(map(repr, NAMED_GRAPHS))}, or a square "
            "matrix of weights, one row and one column for each worker. Received: "
            f"graph={show(graph)}"
        )
    if not np.all((matrix >= 0) & (matrix <= 1)):
        raise ValueError(
            "All entries of `graph` must be in [0, 1]: the share of each worker's "
            f"weights in a mean. Received: graph={show(graph)}"
        )
    sums = np.concatenate([matrix.sum(axis=0), matrix.sum(axis=1)])
    if np.any(np.abs(sums - 1) > _ROUNDING):
        raise ValueError(
            "`graph` must be doubly stochastic: every row and every column must add up "
            "to 1, or the mean over all workers would change. Received: "
            f"graph={show(graph)}, with sums of columns {matrix.sum(axis=0)} and of "
            f"rows {matrix.sum(axis=1)}"
        )
    _check_consensus(matrix, graph)
    return matrix


def matchings(matrix: Matrix) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs that together are all edges of a graph.

    All workers process the rounds in this order, which rules out deadlocks.

    Args:
        matrix: mixing weights, `[N, N]`.
    """
    rounds: list[list[tuple[int, int]]] = []
    linked = (matrix > 0) | (matrix.T > 0)
    for low, high in zip(*np.nonzero(np.triu(linked, 1)), strict=True):
        pair = int(low), int(high)
        for pairs in rounds:
            if not any(set(pair) & set(other) for other in pairs):
                pairs.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def _ring(number: int) -> Matrix:
    """Return equal weights for a worker and its two neighbors."""
    eye = np.eye(number)
    linked = eye + np.roll(eye, 1, axis=1) + np.roll(eye, -1, axis=1) > 0
    weights: Matrix = linked / linked.sum(axis=1, keepdims=True)
    return weights


def _check_consensus(matrix: Matrix, graph: Any) -> None:
    number = len(matrix)
    reached = np.linalg.matrix_power((matrix > 0) + np.eye(number), number) > 0
    if not reached.all():
        raise ValueError(
            "`graph` must be connected: there must be a path of positive weights from "
            "each worker to each other one, or they never agree; worker 0 reaches "
            f"{np.flatnonzero(reached[:, 0]).tolist()} of {number} workers. Received: "
            f"graph={show(graph)}"
        )
    slowest = np.abs(np.linalg.eigvals(matrix - 1 / number)).max()
    if slowest > 1 - 1e-9:
        raise ValueError(
            "`graph` must bring workers together: with this one they pass their "
            "weights around and never agree. Let each keep a share of its own, for "
            f"example `(np.eye({number}) + graph) / 2`. Received: graph={show(graph)}"
        )
