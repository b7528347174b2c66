"""Adam correction in NumPy with N simulated workers."""

import copy

import numpy as np
from oracle import Oracle, clip


class AdamOracle(Oracle):
    """Weights, Adam's slots, and the state of every worker."""

    num_moments = 1
    refreshes = (*(2**i for i in range(10)), *range(1024, 10000, 1024))

    def __init__(
        self,
        *args,
        learning_rate,
        beta_1,
        wait,
        beta_2=0.999,
        epsilon=1e-7,
        weight_decay=0.0,
        positions=None,
        **settings,
    ):
        super().__init__(
            *args,
            learning_rate=learning_rate,
            momentum=self._local_momentum(beta_1, wait),
            **settings,
        )
        self.beta_1 = beta_1
        self.scales_first = self.scales_first and not self.momentum
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self.corrected = 0  # steps so far
        self.positions = positions  # the step's sample, `[tensor][entry]`
        self.sampled_squares = [np.zeros(2) for _ in self.weights]
        self.slots = [self._zeros(1 + self.num_moments, w) for w in self.weights]
        for worker in self.workers:
            worker.moments = [self._zeros(self.num_moments, w) for w in self.weights]

    @staticmethod
    def _local_momentum(beta_1, wait):
        """Return the momentum that delayed sending does not already provide.

        Together they delay a gradient by beta_1 / (1 - beta_1) steps.
        """
        late = max(beta_1 / (1 - beta_1) - wait, 0)
        return late / (late + 1)

    @staticmethod
    def _zeros(number, like):
        return [np.zeros_like(like) for _ in range(number)]

    def step(self, gradients):
        """Apply one step; `gradients[worker][tensor]`."""
        sparsity = self.sparsity(self.iteration)
        self.learning_rate = self._current_rate()
        counts = [self._count(w, sparsity) for w in self.weights]
        dense = self._goes_dense(counts, sparsity)
        stock = dense and not self.corrected
        local = [clip(g, self.num_workers, **self.clipping) for g in gradients]
        for i, (w, k) in enumerate(zip(self.weights, counts, strict=True)):
            gradients = [g[i] for g in local]
            w -= self.learning_rate * self.weight_decay * w
            if stock or self._is_uncompressed(w):
                w -= self._uncorrected_update(i, sum(gradients))
            else:
                w -= self._corrected_update(i, gradients, w.size if dense else k)
        self.corrected += not stock
        if self.corrected in self.refreshes:
            self._refresh()
        self.iteration += 1

    def take_over(self, other):
        """Copy the state of an oracle with another number of workers."""
        for name in ("iteration", "corrected", "weights", "slots", "sampled_squares"):
            setattr(self, name, copy.deepcopy(getattr(other, name)))
        for i in range(len(self.weights)):
            for worker in self.workers:
                for name in ("velocity", "residual"):
                    total = sum(getattr(w, name)[i] for w in other.workers)
                    getattr(worker, name)[i][...] = total / self.num_workers
                for j, moment in enumerate(worker.moments[i]):
                    moment[...] = np.mean([w.moments[i][j] for w in other.workers], 0)

    def _uncorrected_update(self, i, gradient):
        m, *moments = self.slots[i]
        m += (1 - self.beta_1) * (gradient - m)
        rate = self.learning_rate * self._bias_correction(self.beta_1)
        return rate * m / self._update_moments(moments, gradient, 1.0)

    def _corrected_update(self, i, gradients, k):
        total, sample, squares = 0.0, 0.0, 0.0
        factor = self._factor(i)
        positions = self.positions(self.iteration)[i]
        m, *common_moments = self.slots[i]
        for worker, gradient in zip(self.workers, gradients, strict=True):
            moments = worker.moments[i]
            if not self.corrected:
                moments[:] = [moment.copy() for moment in common_moments]
            divisor = self._update_moments(moments, gradient, factor)
            if not self.corrected:
                share = self.rates[0] * m / self.num_workers
                worker.velocity[i][...] = share / divisor
                delays = [b / (1 - b) for b in (self.beta_1, self.momentum)]
                worker.residual[i] += (delays[0] - delays[1]) * share
                worker.residual[i] /= divisor
            quotient = (1 - self.momentum) * gradient / divisor
            total += self._accumulate(worker, i, self.rates[0] * quotient, k)
            sample += quotient.flat[positions]
            squares += np.sum(quotient.flat[positions] ** 2)
        self.sampled_squares[i] *= 0.99
        self.sampled_squares[i] += 0.01 * np.array([np.sum(sample**2), squares])
        return self.rates[1] * self._bias_correction(self.momentum) * total

    def _refresh(self):
        for i, w in enumerate(self.weights):
            for j in range(0 if self._is_uncompressed(w) else self.num_moments):
                moments = [worker.moments[i][j] for worker in self.workers]
                common = self._common(moments)
                for moment in moments:
                    moment[...] = common

    def _common(self, moments):
        return np.mean(moments, axis=0)

    def _update_moments(self, moments, gradient, factor):
        """Update the moments by a gradient; return its divisor."""
        (moment,) = moments
        moment += (1 - self.beta_2) * (factor * gradient**2 - moment)
        return self._root(moment)

    def _accumulate(self, worker, i, divided, k):
        return self._send(worker, i, divided, k, self.value_dtype)

    def _factor(self, i):
        """Return the second moment of the sum over that of one worker's gradient."""
        total, squares = self.sampled_squares[i]
        ratio = total / squares if squares else self.num_workers
        return self.num_workers * np.clip(ratio, 1, self.num_workers)

    def _bias_correction(self, momentum):
        return 1 / (1 - momentum ** (self.iteration + 1))

    def _root(self, moment):
        bias = 1 - self.beta_2 ** (self.iteration + 1)
        return (np.sqrt(moment) + self.epsilon) / np.sqrt(bias)


class AmsgradOracle(AdamOracle):
    """Divides by the root of the largest second moment so far."""

    num_moments = 2

    def _update_moments(self, moments, gradient, factor):
        super()._update_moments(moments[:1], gradient, factor)
        moments[1][...] = np.maximum(*moments)
        return self._root(moments[1])


class AdamaxOracle(AdamOracle):
    """Divides by the largest magnitude, which decays by beta_2."""

    def _update_moments(self, moments, gradient, factor):
        (largest,) = moments
        magnitude = np.sqrt(factor) * np.abs(gradient)
        largest[...] = np.maximum(self.beta_2 * largest, magnitude)
        return largest + self.epsilon

    def _common(self, moments):
        return np.max(moments, axis=0)


class NadamOracle(AdamOracle):
    """Applies Nesterov momentum with a schedule before it accumulates."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.scales_first = False

    @staticmethod
    def _local_momentum(beta_1, wait):
        return beta_1

    def _uncorrected_update(self, i, gradient):
        m, *moments = self.slots[i]
        m += (1 - self.momentum) * (gradient - m)
        update = self._look_ahead(m, gradient)
        divisor = self._update_moments(moments, gradient, 1.0)
        return self.learning_rate * update / divisor

    def _accumulate(self, worker, i, divided, k):
        velocity = worker.velocity[i]
        velocity[...] = self.momentum * velocity + divided
        update = self._look_ahead(velocity, divided / (1 - self.momentum))
        momentum, self.momentum = self.momentum, 0.0
        velocity_before = velocity.copy()
        sent = self._send(worker, i, update, k, self.value_dtype)
        velocity[...] = velocity_before
        self.momentum = momentum
        return sent

    def _look_ahead(self, momentum, gradient):
        """Dozat (2016), algorithm 2, with the momenta of all steps so far."""
        steps = np.arange(1, self.iteration + 3)
        momenta = self.momentum * (1 - 0.5 * 0.96**steps)
        products = np.cumprod(momenta)
        momentum_factor = momenta[-1] / (1 - products[-1])
        gradient_factor = (1 - momenta[-2]) / (1 - products[-2])
        return momentum_factor * momentum + gradient_factor * gradient

    def _bias_correction(self, momentum):
        return 1.0

    def _root(self, moment):
        bias = 1 - self.beta_2 ** (self.iteration + 1)
        return np.sqrt(moment / bias) + self.epsilon
