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


class ChangingChoco:
    """Choco-SGD on a graph that changes: each phase has copies of its own.

    Args:
        matrices: weights of each round in turn, `[N, N]`.
        weights: what all begin with; copies too.
        step_size: gamma.
        make_compress: function that returns one worker's compression in one phase: a
            function of what it wants to send, that returns what it sends.
    """

    def __init__(self, matrices, weights, step_size, make_compress):
        self.matrices, self.gamma, self.number = matrices, step_size, 0
        workers = range(len(matrices[0]))
        self.weights = [weights.copy() for _ in workers]
        self.copies = [[weights.copy() for _ in workers] for _ in matrices]
        self.compress = [[make_compress() for _ in workers] for _ in matrices]

    def round(self, moves):
        """Let each worker move, send, and go towards those that it hears."""
        half = [w + m for w, m in zip(self.weights, moves, strict=True)]
        phase = self.number % len(self.matrices)
        self.number += 1
        copies, matrix = self.copies[phase], self.matrices[phase]
        for copy, x, compress in zip(copies, half, self.compress[phase], strict=True):
            copy += compress(x - copy)
        for i, x in enumerate(half):
            pulls = [
                w * (c - copies[i]) for w, c in zip(matrix[i], copies, strict=True)
            ]
            self.weights[i] = x + self.gamma * sum(pulls)


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
