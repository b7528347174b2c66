"""Rounds of which the mean comes later, in plain NumPy: all workers, one by one."""

import copy

import numpy as np
from local_reference import Momentum


class DelayedRun:
    """Workers that go on while the mean of how far they moved is formed.

    Every worker's weights are written as anchor - move under way - what came since, so
    that nothing here is corrected by a difference, as it is there.

    Args:
        inner: optimizer of each worker.
        period: steps after which the same tensor is exchanged again; or a set of the
            steps behind which there is an exchange.
        delay: steps that a mean takes.
        parts: places of the tensors of each part, which take turns.
        outer: optimizer of the mean.
        compress: function of what one worker wants to send, that returns what it sends.
    """

    def __init__(self, inner, period, delay, parts, outer=None, compress=None):
        self.inner, self.delay, self.parts = inner, delay, parts
        self.ends = period if isinstance(period, set) else None
        self.stride = None if self.ends else period // len(parts)
        self.outers = [copy.deepcopy(outer or Momentum(1.0)) for _ in parts]
        self.compress = compress or (lambda values: values)

    def start(self, weights, num_workers):
        run = copy.deepcopy(self)
        run.anchor = [w.copy() for w in weights]
        zeros = [np.zeros_like(w) for w in weights]
        run.under_way = [list(zeros) for _ in range(num_workers)]
        run.since = [list(zeros) for _ in range(num_workers)]
        run.residual = [list(zeros) for _ in range(num_workers)]
        run.inners = [copy.deepcopy(self.inner) for _ in range(num_workers)]
        run.calls = run.rounds = 0
        run.mean = None
        return run

    @property
    def weights(self):
        return [
            [a - m - s for a, m, s in zip(self.anchor, moves, since, strict=True)]
            for moves, since in zip(self.under_way, self.since, strict=True)
        ]

    def step(self, gradients):
        """Take a step by `gradients[worker][tensor]`, divided by their number."""
        number = len(gradients)
        for worker, mine in enumerate(gradients):
            before = self.weights[worker]
            after = self.inners[worker].step(before, [number * g for g in mine])
            pairs = zip(self.since[worker], before, after, strict=True)
            self.since[worker] = [s + b - a for s, b, a in pairs]
        self.calls += 1
        end = self.calls in self.ends if self.ends else self.calls % self.stride == 0
        if self.mean is not None and (end or self.calls >= self.begun + self.delay):
            self.receive()
        if end:
            self.begin()

    def begin(self):
        places = self.parts[self.rounds % len(self.parts)]
        number, self.mean = len(self.since), [0.0] * len(places)
        for worker, since in enumerate(self.since):
            for j, i in enumerate(places):
                wanted = self.residual[worker][i] + since[i] / number
                sent = self.compress(wanted)
                self.residual[worker][i] = wanted - sent
                self.mean[j] = self.mean[j] + sent
                self.under_way[worker][i] = since[i]
                since[i] = np.zeros_like(since[i])
        self.begun = self.calls
        self.rounds += 1

    def receive(self):
        part = (self.rounds - 1) % len(self.parts)
        places = self.parts[part]
        moved = self.outers[part].step([self.anchor[i] for i in places], self.mean)
        for i, a in zip(places, moved, strict=True):
            self.anchor[i] = a
            for under_way in self.under_way:
                under_way[i] = np.zeros_like(a)
        self.mean = None

    def consensus(self):
        if self.mean is not None:
            self.receive()
        for _ in self.parts:
            self.begin()
            self.receive()
