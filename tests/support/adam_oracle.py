"""Adam correction in NumPy with N simulated workers."""

import numpy as np
from oracle import Oracle, clip


class AdamOracle(Oracle):
    """Weights, Adam's slots, and what every worker keeps."""

    def __init__(
        self,
        *args,
        beta_2=0.999,
        epsilon=1e-7,
        weight_decay=0.0,
        positions=None,
        **settings,
    ):
        super().__init__(*args, **settings)
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self.begun = False
        self.positions = positions  # of the step's sample, `[tensor][entry]`
        self.seen = [np.zeros(2) for _ in self.weights]
        self.slots = [(np.zeros_like(w), np.zeros_like(w)) for w in self.weights]
        for worker in self.workers:
            worker.moment = [np.zeros_like(w) for w in self.weights]

    def step(self, gradients):
        """Apply one step; `gradients[worker][tensor]`."""
        sparsity = self.sparsity(self.iteration)
        stock = sparsity == 0 and not self.begun
        counts = [self._count(w, sparsity) for w in self.weights]
        dense = self._goes_dense(counts, sparsity)
        local = [clip(g, self.num_workers, **self.clipping) for g in gradients]
        for i, (w, k) in enumerate(zip(self.weights, counts, strict=True)):
            own = [g[i] for g in local]
            w -= self.learning_rate * self.weight_decay * w
            if stock or self._exempt(w):
                w -= self._by_rule(i, sum(own))
            else:
                w -= self._by_sum(i, own, w.size if dense else k)
        self.begun = self.begun or not stock
        self.iteration += 1

    def _by_rule(self, i, gradient):
        m, v = self.slots[i]
        m += (1 - self.momentum) * (gradient - m)
        v += (1 - self.beta_2) * (gradient**2 - v)
        return self._rate() * m / self._root(v)

    def _by_sum(self, i, gradients, k):
        total, sample, squares = 0.0, 0.0, 0.0
        factor = self._factor(i)
        at = self.positions(self.iteration)[i]
        m, v = self.slots[i]
        for worker, gradient in zip(self.workers, gradients, strict=True):
            s, velocity, residual = (
                kept[i] for kept in (worker.moment, worker.velocity, worker.residual)
            )
            if not self.begun:
                s[...] = v
            s += (1 - self.beta_2) * (factor * gradient**2 - s)
            if not self.begun:
                velocity[...] = m / self.num_workers / self._root(s)
                residual /= self._root(s)
            given = (1 - self.momentum) * gradient / self._root(s)
            total += self._send(worker, i, given, k, self.value_dtype)
            sample += given.flat[at]
            squares += np.sum(given.flat[at] ** 2)
        self.seen[i] *= 0.99
        self.seen[i] += 0.01 * np.array([np.sum(sample**2), squares])
        return self._rate() * total

    def _factor(self, i):
        """Return the second moment of the sum by that of one worker's gradient."""
        total, squares = self.seen[i]
        agree = total / squares if squares else self.num_workers
        return self.num_workers * np.clip(agree, 1, self.num_workers)

    def _rate(self):
        return self.learning_rate / (1 - self.momentum ** (self.iteration + 1))

    def _root(self, moment):
        known = 1 - self.beta_2 ** (self.iteration + 1)
        return (np.sqrt(moment) + self.epsilon) / np.sqrt(known)
