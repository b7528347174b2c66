"""Rounds of local steps in plain NumPy: all workers, one after the other."""

import copy

import numpy as np


class Momentum:
    """SGD as Keras has it, on a list of arrays; of the mean of `every` gradients."""

    def __init__(self, rate, momentum=0.0, nesterov=False, every=1):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.every, self.velocity, self.waiting = every, None, []

    def step(self, weights, gradients):
        self.waiting.append(gradients)
        if len(self.waiting) < self.every:
            return weights
        gradients = [sum(g) / self.every for g in zip(*self.waiting, strict=True)]
        self.waiting = []
        v = self.velocity or [np.zeros_like(w) for w in weights]
        pairs = list(zip(v, gradients, strict=True))
        v = self.velocity = [self.momentum * a - self.rate * g for a, g in pairs]
        pairs = zip(v, gradients, strict=True)
        if self.nesterov:
            v = [self.momentum * a - self.rate * g for a, g in pairs]
        return [w + a for w, a in zip(weights, v, strict=True)]


class AdamW:
    """AdamW as Keras has it."""

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
    """Workers that take local steps and exchange how far they moved.

    Args:
        inner: optimizer of each worker.
        period: local steps of a round, or a function of the step it begins with.
        outer: optimizer of the mean; None for the mean itself.
        compress: function of what one worker wants to send of a tensor, that returns
            what it sends; None for all.
        kept: share of what was not sent that is added to what is to be sent next.
    """

    def __init__(self, inner, period, outer=None, compress=None, kept=1.0):
        self.inner, self.period, self.outer = inner, period, outer or Momentum(1.0)
        self.compress, self.kept = compress or (lambda values: values), kept

    def start(self, weights, num_workers):
        run = copy.deepcopy(self)
        run.anchor = weights
        run.weights = [list(weights) for _ in range(num_workers)]
        run.inners = [copy.deepcopy(self.inner) for _ in range(num_workers)]
        zeros = [np.zeros_like(w) for w in weights]
        run.residual = [list(zeros) for _ in range(num_workers)]
        run.calls = run.taken = run.rounds = 0
        return run

    def step(self, gradients):
        """Take a step by `gradients[worker][tensor]`, divided by their number."""
        number = len(self.weights)
        period = self.period
        if callable(period):
            period = period(self.calls - self.taken)
        for worker, mine in enumerate(gradients):
            if all(np.all(np.isfinite(g)) for g in mine):
                own = [number * g for g in mine]
                before = self.weights[worker]
                self.weights[worker] = self.inners[worker].step(before, own)
        self.calls, self.taken = self.calls + 1, self.taken + 1
        if self.taken == period:
            self.taken, self.rounds = 0, self.rounds + 1
            self._exchange()

    def _exchange(self):
        number, mean = len(self.weights), [0.0] * len(self.anchor)
        for worker, weights in enumerate(self.weights):
            for i, w in enumerate(weights):
                wanted = self.kept * self.residual[worker][i]
                wanted = wanted + (self.anchor[i] - w) / number
                sent = self.compress(wanted)
                self.residual[worker][i] = wanted - sent
                mean[i] = mean[i] + sent
        self.anchor = self.outer.step(self.anchor, mean)
        self.weights = [list(self.anchor) for _ in range(number)]
