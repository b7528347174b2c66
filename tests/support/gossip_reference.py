"""Gossip in plain NumPy: all workers, one after the other."""

import numpy as np


class DPSGD:
    """Lian et al., NeurIPS 2017, averaging after the local step.

    Args:
        matrices: weights of each round in turn, `[N, N]`.
        weights: what all begin with.
    """

    def __init__(self, matrices, weights):
        self.matrices, self.number = matrices, 0
        self.weights = [weights.copy() for _ in matrices[0]]

    def round(self, moves, broken=None):
        """Let each worker move by itself, and then take the mean of its neighbours.

        A worker that broke is left out: what others would take of it they take of
        themselves, and it takes of its neighbours alone.
        """
        matrix = np.array(self.matrices[self.number % len(self.matrices)])
        self.number += 1
        half = [w + m for w, m in zip(self.weights, moves, strict=True)]
        if broken is not None:
            matrix[np.diag_indices_from(matrix)] += matrix[:, broken]
            matrix[:, broken] = 0
            matrix[broken] /= matrix[broken].sum()
        self.weights = [
            sum(share * x for share, x in zip(row, half, strict=True)) for row in matrix
        ]


class Choco:
    """Koloskova et al., ICML 2019, algorithm 2: each knows its neighbours' copies.

    Args:
        matrix: weights, `[N, N]`.
        weights: what all begin with; copies too.
        step_size: gamma.
        compress: function of what a worker wants to send and of the round's number.
    """

    def __init__(self, matrix, weights, step_size, compress):
        self.matrix, self.gamma, self.compress = matrix, step_size, compress
        number = len(matrix)
        self.weights = [weights.copy() for _ in range(number)]
        self.copies = [[weights.copy() for _ in range(number)] for _ in range(number)]
        self.number = 0

    def round(self, moves, broken=None):
        """Let each worker move, and send; one that broke begins with its copy."""
        half = [w + m for w, m in zip(self.weights, moves, strict=True)]
        if broken is not None:
            half[broken] = self.copies[broken][broken]
        workers = range(len(half))
        sent = [
            self.compress(half[i] - self.copies[i][i], self.number) for i in workers
        ]
        self.number += 1
        for i in workers:
            for j in workers:
                if self.matrix[i][j] > 0 or i == j:
                    self.copies[i][j] = self.copies[i][j] + sent[j]
            pull = np.zeros_like(half[i])
            for j in workers:
                pull += self.matrix[i][j] * (self.copies[i][j] - self.copies[i][i])
            self.weights[i] = half[i] + self.gamma * pull
