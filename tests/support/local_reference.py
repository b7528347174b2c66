"""Local steps in plain NumPy: all workers, one after another."""

import copy

import numpy as np


class Momentum:
    """Keras's SGD on a list of arrays, with the mean of `every` gradients."""

    def __init__(self, rate, momentum=0.0, nesterov=False, every=1):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.every, self.velocity, self.accumulated = every, None, []

    def step(self, weights, gradients):
        self.accumulated.append(gradients)
        if len(self.accumulated) < self.every:
            return weights
        gradients = [sum(g) / self.every for g in zip(*self.accumulated, strict=True)]
        self.accumulated = []
        v = self.velocity or [np.zeros_like(w) for w in weights]
        pairs = list(zip(v, gradients, strict=True))
        v = self.velocity = [self.momentum * a - self.rate * g for a, g in pairs]
        pairs = zip(v, gradients, strict=True)
        if self.nesterov:
            v = [self.momentum * a - self.rate * g for a, g in pairs]
        return [w + a for w, a in zip(weights, v, strict=True)]


class AdamW:
    """Keras's AdamW."""

    def __init__(self, rate, decay, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
        self.rate, self.decay, self.epsilon = rate, decay, epsilon
        self.betas, self.moments, self.number = (beta_1, beta_2), None, 0

    def step(self, weights, gradients):
        self.number += 1
        (b1, b2), t = self.betas, self.number
        rate = self.rate * np.sqrt(1 - b2**t) / (1 - b1**t)
        zeros = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
        self.moments = [
            (m + (g - m) * (1 - b1), v + (g * g - v) * (1 - b2))
            for (m, v), g in zip(self.moments or zeros, gradients, strict=True)
        ]
        return [
            w - w * self.decay * self.rate - rate * m / (np.sqrt(v) + self.epsilon)
            for w, (m, v) in zip(weights, self.moments, strict=True)
        ]


class LocalRun:
    """Workers that take local steps and average their parameter deltas.

    Args:
        inner: optimizer of each worker.
        period: number of local steps in a round, or a function of its first step.
        outer: optimizer that applies the mean; None to subtract the mean.
        compress: function from a worker's delta of a tensor to the part of it that is
            sent; None to send all.
        decay: factor of the residual before the next delta is added.
    """

    def __init__(self, inner, period, outer=None, compress=None, decay=1.0):
        self.inner, self.period, self.outer = inner, period, outer or Momentum(1.0)
        self.compress, self.decay = compress or (lambda values: values), decay

    def start(self, weights, num_workers):
        run = copy.deepcopy(self)
        run.anchor = weights
        run.weights = [list(weights) for _ in range(num_workers)]
        run.inners = [copy.deepcopy(self.inner) for _ in range(num_workers)]
        zeros = [np.zeros_like(w) for w in weights]
        run.residual = [list(zeros) for _ in range(num_workers)]
        run.calls = 0
        run.taken = 0  # of the current round
        run.rounds = 0
        return run

    def step(self, gradients):
        """Take a step by `gradients[worker][tensor]`, divided by their number."""
        num_workers = len(self.weights)
        period = self.period
        if callable(period):
            period = period(self.calls - self.taken)
        for worker, local in enumerate(gradients):
            if all(np.all(np.isfinite(g)) for g in local):
                scaled = [num_workers * g for g in local]
                before = self.weights[worker]
                self.weights[worker] = self.inners[worker].step(before, scaled)
        self.calls += 1
        self.taken += 1
        if self.taken == period:
            self.taken = 0
            self.rounds += 1
            self._synchronize()

    def _synchronize(self):
        num_workers = len(self.weights)
        mean = [0.0] * len(self.anchor)
        for worker, weights in enumerate(self.weights):
            for i, w in enumerate(weights):
                delta = self.decay * self.residual[worker][i]
                delta = delta + (self.anchor[i] - w) / num_workers
                sent = self.compress(delta)
                self.residual[worker][i] = delta - sent
                mean[i] = mean[i] + sent
        self.anchor = self.outer.step(self.anchor, mean)
        self.weights = [list(self.anchor) for _ in range(num_workers)]
