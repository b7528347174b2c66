"""Gossip: workers exchange with their neighbours in a graph, and with nobody else."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.collectives import graphs
from tf_dgc.collectives.algorithm import AlgorithmSteps, Rank, send_to
from tf_dgc.collectives.requests import SendRecv
from tf_dgc.collectives.ring import Ring


@keras.saving.register_keras_serializable(package="tf_dgc")
class Gossip(Ring):
    """Averages with neighbours only, for `LocalOptimizer(exchange=...)`.

    As a round ends, each worker takes a mean of its weights and its neighbours', by
    weights that leave the mean over all workers what it is: D-PSGD. What a compressor
    sends are differences to copies of its weights that its neighbours have: Choco-SGD.

    >>> ring = tf_dgc.collectives.Gossip("ring")
    >>> tf_dgc.LocalOptimizer(sgd, 1, exchange=ring)
    >>> slow = tf_dgc.collectives.Gossip("torus", step_size=0.2)
    >>> tf_dgc.LocalOptimizer(sgd, 4, exchange=slow, compressor="top_k")

    Workers come to one result only by `LocalOptimizer.consensus()`. What all workers
    sum besides goes around a ring.

    Args:
        graph: name of a graph: "ring"; "torus", as square as the number of workers
            allows; "exponential", in which a worker has one neighbour per round, at
            distances of 1, 2, 4 and so on in turn. Or a matrix of weights,
            `[num_workers, num_workers]`, whose row i is the mean that worker i takes:
            doubly stochastic, and such that workers come to a consensus. It is copied;
            one worker alone may have any.
        step_size: share of the way to the mean that a worker goes, in (0, 1], gamma in
            Choco-SGD; None for 1, which only what is sent without loss may have. The
            less a method sends, the smaller it has to be.

    Raises:
        ValueError: for graphs and step sizes other than that; when the optimizer is
            made, for a matrix of another number of workers.
    """

    name = "gossip"
    reference = "Lian et al., NeurIPS 2017; Koloskova et al., ICML 2019"
    is_neighbor_exchange = True

    def __init__(self, graph: Any = "ring", step_size: float | None = None):
        named = isinstance(graph, str) and graph in graphs.NAMED_GRAPHS
        self.graph = graph if named else graphs.check_mixing_matrix(graph)
        if step_size is not None:
            means = ": the share of the way to the neighbours' mean, or None"
            step_size = check_number("step_size", step_size, "(0, 1]", means)
        self.step_size = step_size

    def weights(self, num_workers: int) -> list[np.ndarray]:
        """Return the weights of each round in turn, `[num_workers, num_workers]`.

        Raises:
            ValueError: for a matrix of another number of workers.
        """
        return graphs.mixing_weights(self.graph, num_workers)

    def neighbours(self, place: Rank, phase: int) -> list[int]:
        """Return whose words a worker gets, ascending.

        Args:
            place: place of the worker.
            phase: number of the round, modulo those of `weights`.
        """
        row = self.weights(place.num_workers)[phase][place.worker]
        return [int(i) for i in np.flatnonzero(row) if i != place.worker]

    def gather_near(self, words: tf.Tensor, place: Rank, phase: int) -> AlgorithmSteps:
        """Gather the words of a worker's neighbours.

        Args:
            words: words of this worker, int32 `[w]`, w equal on all.
            place: place of this worker.
            phase: number of the round, modulo those of `weights`.

        Yields:
            What this worker asks for: pair by pair, of its neighbours alone.

        Returns:
            The words, `[neighbours, w]`, in the order of `neighbours`.
        """
        matrix = self.weights(place.num_workers)[phase]
        worker, rows = place.worker, {}
        for pairs in graphs.matchings(matrix):
            pair = next((p for p in pairs if worker in p), None)
            if pair is None:
                yield []
                continue
            other = sum(pair) - worker
            gives, takes = matrix[other, worker] > 0, matrix[worker, other] > 0
            if gives and takes:
                (rows[other],) = yield [SendRecv(words, other)]
            elif gives:
                yield [send_to(words, worker, other)]
            else:
                (rows[other],) = yield [send_to(words, other, worker)]
        found = [rows[other] for other in sorted(rows)]
        return tf.stack(found) if found else words[tf.newaxis][:0]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        named = isinstance(self.graph, str)
        graph = self.graph if named else self.graph.tolist()
        return {"graph": graph, "step_size": self.step_size}
