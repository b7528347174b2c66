"""Local steps with a delayed mean in plain NumPy: all workers, one after another."""

import copy

import numpy as np
from local_reference import Momentum


class DelayedRun:
    """Workers that train on while their parameter deltas are averaged.

    A worker's weights are the anchor minus its pending delta (part of the current mean)
    minus its delta since then. `tf_dgc` corrects the weights by differences instead.

    Args:
        inner: optimizer of each worker.
        period: number of steps between two exchanges of a tensor; or the set of steps
            after which there is an exchange.
        delay: number of steps that a mean takes.
        parts: indices of the tensors of each fragment; fragments take turns.
        outer: optimizer that applies the mean.
        compress: function from a worker's delta to the part of it that is sent.
    """

    def __init__(self, inner, period, delay, parts, outer=None, compress=None):
        self.inner, self.delay, self.fragments = inner, delay, parts
        self.round_ends = period if isinstance(period, set) else None
        self.stride = None if self.round_ends else period // len(parts)
        self.outers = [copy.deepcopy(outer or Momentum(1.0)) for _ in parts]
        self.compress = compress or (lambda values: values)

    def start(self, weights, num_workers):
        run = copy.deepcopy(self)
        run.anchor = [w.copy() for w in weights]
        zeros = [np.zeros_like(w) for w in weights]
        run.pending = [list(zeros) for _ in range(num_workers)]
        run.deltas = [list(zeros) for _ in range(num_workers)]
        run.residual = [list(zeros) for _ in range(num_workers)]
        run.inners = [copy.deepcopy(self.inner) for _ in range(num_workers)]
        run.calls = 0
        run.rounds = 0
        run.mean = None
        return run

    @property
    def weights(self):
        return [
            [a - p - d for a, p, d in zip(self.anchor, pending, deltas, strict=True)]
            for pending, deltas in zip(self.pending, self.deltas, strict=True)
        ]

    def step(self, gradients):
        """Take a step by `gradients[worker][tensor]`, divided by their number."""
        num_workers = len(gradients)
        for worker, local in enumerate(gradients):
            before = self.weights[worker]
            after = self.inners[worker].step(before, [num_workers * g for g in local])
            triples = zip(self.deltas[worker], before, after, strict=True)
            self.deltas[worker] = [d + b - a for d, b, a in triples]
        self.calls += 1
        if self.round_ends:
            ends_round = self.calls in self.round_ends
        else:
            ends_round = self.calls % self.stride == 0
        if self.mean is not None and (
            ends_round or self.calls >= self.mean_start + self.delay
        ):
            self.finish_mean()
        if ends_round:
            self.start_mean()

    def start_mean(self):
        indices = self.fragments[self.rounds % len(self.fragments)]
        num_workers = len(self.deltas)
        self.mean = [0.0] * len(indices)
        for worker, deltas in enumerate(self.deltas):
            for j, i in enumerate(indices):
                delta = self.residual[worker][i] + deltas[i] / num_workers
                sent = self.compress(delta)
                self.residual[worker][i] = delta - sent
                self.mean[j] = self.mean[j] + sent
                self.pending[worker][i] = deltas[i]
                deltas[i] = np.zeros_like(deltas[i])
        self.mean_start = self.calls
        self.rounds += 1

    def finish_mean(self):
        fragment = (self.rounds - 1) % len(self.fragments)
        indices = self.fragments[fragment]
        anchor = [self.anchor[i] for i in indices]
        anchor = self.outers[fragment].step(anchor, self.mean)
        for i, a in zip(indices, anchor, strict=True):
            self.anchor[i] = a
            for pending in self.pending:
                pending[i] = np.zeros_like(a)
        self.mean = None

    def consensus(self):
        if self.mean is not None:
            self.finish_mean()
        for _ in self.fragments:
            self.start_mean()
            self.finish_mean()
