"""Gossip in plain NumPy: all workers, one after another."""

import numpy as np


class DPSGD:
    """Lian et al., NeurIPS 2017, averaging after the local step.

    Args:
        matrices: mixing matrix of each round in turn, `[N, N]`.
        weights: initial weights of all workers.
    """

    def __init__(self, matrices, weights):
        self.matrices, self.number = matrices, 0
        self.weights = [weights.copy() for _ in matrices[0]]

    def round(self, moves, broken=None):
        """Move each worker, and then average the neighbors' weights.

        A broken worker is left out: the others replace its weights by their own, and
        it takes the mean of its neighbors alone.
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
    """Choco-SGD on a changing graph: each phase has its own replicas (x-hat).

    Args:
        matrices: mixing matrix of each round in turn, `[N, N]`.
        weights: initial weights and replicas of all workers.
        step_size: gamma.
        make_compress: function that returns one worker's compression in one phase: a
            function from a difference to the part of it that is sent.
    """

    def __init__(self, matrices, weights, step_size, make_compress):
        self.matrices, self.gamma, self.number = matrices, step_size, 0
        workers = range(len(matrices[0]))
        self.weights = [weights.copy() for _ in workers]
        self.copies = [[weights.copy() for _ in workers] for _ in matrices]
        self.compress = [[make_compress() for _ in workers] for _ in matrices]

    def round(self, moves):
        """Move each worker, send, and mix with the neighbors' replicas."""
        half = [w + m for w, m in zip(self.weights, moves, strict=True)]
        phase = self.number % len(self.matrices)
        self.number += 1
        replicas, matrix = self.copies[phase], self.matrices[phase]
        triples = zip(replicas, half, self.compress[phase], strict=True)
        for replica, x, compress in triples:
            replica += compress(x - replica)
        for i, x in enumerate(half):
            terms = [
                w * (r - replicas[i]) for w, r in zip(matrix[i], replicas, strict=True)
            ]
            self.weights[i] = x + self.gamma * sum(terms)


class Choco:
    """Koloskova et al., ICML 2019, algorithm 2: workers hold their neighbors' replicas.

    Args:
        matrix: mixing matrix, `[N, N]`.
        weights: initial weights and replicas of all workers.
        step_size: gamma.
        compress: function from a difference and the number of the round to the part
            of the difference that is sent.
    """

    def __init__(self, matrix, weights, step_size, compress):
        self.matrix, self.gamma, self.compress = matrix, step_size, compress
        workers = range(len(matrix))
        self.weights = [weights.copy() for _ in workers]
        self.copies = [[weights.copy() for _ in workers] for _ in workers]
        self.number = 0

    def round(self, moves, broken=None):
        """Move each worker, and send; a broken worker starts from its replica."""
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
            mixing = np.zeros_like(half[i])
            for j in workers:
                difference = self.copies[i][j] - self.copies[i][i]
                mixing += self.matrix[i][j] * difference
            self.weights[i] = half[i] + self.gamma * mixing
