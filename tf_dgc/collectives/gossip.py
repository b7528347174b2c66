"""Gossip: workers exchange with their neighbors in a graph only."""

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
    """Averages with neighbors only, for `LocalOptimizer(collective=...)`.

    At the end of a round each worker averages its weights with its neighbors', such
    that the mean over all workers does not change: D-PSGD. With a compressor it sends
    differences to the replicas of its weights that its neighbors hold: Choco-SGD.

    >>> ring = tf_dgc.collectives.Gossip("ring")
    >>> tf_dgc.LocalOptimizer(sgd, 1, collective=ring)
    >>> slow = tf_dgc.collectives.Gossip("torus", step_size=0.2)
    >>> tf_dgc.LocalOptimizer(sgd, 4, collective=slow, compressor="top_k")

    Workers reach the same weights only by `LocalOptimizer.consensus()`. Sums over all
    workers, as of metrics, use TensorFlow's collectives.

    Args:
        graph: name of a graph: "ring"; "torus", as square as the number of workers
            allows; "exponential", in which a worker has one neighbor per round, at
            distances 1, 2, 4, ... in turn. Or a matrix of mixing weights,
            `[num_workers, num_workers]`, whose row i holds the weights of worker i's
            mean: doubly stochastic, and such that repeated averaging reaches a
            consensus. It is copied; a single worker may have any matrix.
        step_size: fraction of the way to the mean that a worker moves, in (0, 1], gamma
            in Choco-SGD; None for 1, which requires lossless messages. The less a
            method sends, the smaller it must be.

    Raises:
        ValueError: for any other graph or step size; when the optimizer is created, if
            the matrix is for another number of workers.
    """

    name = "gossip"
    reference = "Lian et al., NeurIPS 2017; Koloskova et al., ICML 2019"
    is_neighbor_exchange = True

    def __init__(self, graph: Any = "ring", step_size: float | None = None):
        is_name = isinstance(graph, str) and graph in graphs.NAMED_GRAPHS
        self.graph = graph if is_name else graphs.check_mixing_matrix(graph)
        if step_size is not None:
            meaning = ": the share of the way to the neighbors' mean, or None"
            step_size = check_number("step_size", step_size, "(0, 1]", meaning)
        self.step_size = step_size

    def weights(self, num_workers: int) -> list[np.ndarray]:
        """Return mixing weights, `[num_workers, num_workers]`, for each phase.

        Round r uses the weights of phase r modulo the number of phases.

        Raises:
            ValueError: if the matrix is for another number of workers.
        """
        return graphs.mixing_weights(self.graph, num_workers)

    def neighbors(self, rank: Rank, phase: int) -> list[int]:
        """Return the workers whose words a worker receives in a phase, ascending."""
        row = self.weights(rank.num_workers)[phase][rank.worker]
        return [int(i) for i in np.flatnonzero(row) if i != rank.worker]

    def gather_near(self, words: tf.Tensor, rank: Rank, phase: int) -> AlgorithmSteps:
        """Gather the words of a worker's neighbors.

        Args:
            words: words of this worker, int32 `[w]`, w the same on all workers.
            rank: rank of this worker.
            phase: index into `weights`.

        Yields:
            This worker's requests in a round, of one neighbor at most.

        Returns:
            The words, `[neighbors, w]`, in the order of `neighbors`.
        """
        matrix = self.weights(rank.num_workers)[phase]
        worker, rows = rank.worker, {}
        for pairs in graphs.matchings(matrix):
            pair = next((p for p in pairs if worker in p), None)
            if pair is None:
                yield []
                continue
            other = sum(pair) - worker
            sends, receives = matrix[other, worker] > 0, matrix[worker, other] > 0
            if sends and receives:
                (rows[other],) = yield [SendRecv(words, other)]
            elif sends:
                yield [send_to(words, worker, other)]
            else:
                (rows[other],) = yield [send_to(words, other, worker)]
        received = [rows[other] for other in sorted(rows)]
        return tf.stack(received) if received else words[tf.newaxis][:0]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        is_name = isinstance(self.graph, str)
        graph = self.graph if is_name else self.graph.tolist()
        return {"graph": graph, "step_size": self.step_size}
