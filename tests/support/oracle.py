"""Deep Gradient Compression in NumPy with N simulated workers, from the paper."""

import math

import numpy as np
import wire_reference

from tf_dgc import Corrections


def clip(gradients, num_workers, clipnorm=None, global_clipnorm=None, clipvalue=None):
    """Clip one worker's gradients, thresholds of norms scaled by N**-0.5."""
    if clipnorm:
        limit = clipnorm / math.sqrt(num_workers)
        return [g * min(1.0, limit / np.linalg.norm(g)) for g in gradients]
    if global_clipnorm:
        limit = global_clipnorm / math.sqrt(num_workers)
        norm = math.sqrt(sum(np.sum(g**2) for g in gradients))
        return [g * min(1.0, limit / norm) for g in gradients]
    if clipvalue:
        return [np.clip(g, -clipvalue, clipvalue) for g in gradients]
    return gradients


class Worker:
    """Velocity and residual of one worker."""

    def __init__(self, shapes, dtype):
        self.velocity = [np.zeros(s, dtype) for s in shapes]
        self.residual = [np.zeros(s, dtype) for s in shapes]


class Oracle:
    """The weights, and velocity and residual of every worker."""

    def __init__(
        self,
        weights,
        num_workers,
        *,
        sparsity,
        learning_rate,
        momentum=0.0,
        nesterov=False,
        min_compress_size=1024,
        clipping=None,
        value_dtype=None,
        corrections=None,
        tie_offsets=lambda iteration: [0] * 100,
    ):
        self.weights = [w.copy() for w in weights]
        self.num_workers = num_workers
        self.sparsity = sparsity if callable(sparsity) else lambda step: sparsity
        self.rate_at = learning_rate if callable(learning_rate) else None
        self.learning_rate = learning_rate(0) if self.rate_at else learning_rate
        corrections = corrections or Corrections()
        self.scales_first = corrections.scale_before_accumulation
        self.momentum = momentum
        self.nesterov = nesterov
        self.factor_masking = corrections.factor_masking
        self.min_compress_size = min_compress_size
        self.clipping = clipping or {}
        self.dtype = weights[0].dtype.name
        self.value_dtype = value_dtype or self.dtype
        self.tie_offsets = tie_offsets
        self.iteration = 0
        self.workers = [
            Worker([w.shape for w in weights], weights[0].dtype)
            for _ in range(num_workers)
        ]

    def step(self, gradients):
        """Apply one step; `gradients[worker][tensor]`."""
        sparsity = self.sparsity(self.iteration)
        self.learning_rate = self._current_rate()
        local_rate, common_rate = self.rates
        counts = [self._count(w, sparsity) for w in self.weights]
        dense = self._goes_dense(counts, sparsity)
        total = [np.zeros_like(w) for w in self.weights]
        for worker, local in zip(self.workers, gradients, strict=True):
            local = clip(local, self.num_workers, **self.clipping)
            for i, g in enumerate(local):
                k = self.weights[i].size if dense else counts[i]
                whole = dense or self._is_uncompressed(self.weights[i])
                value_dtype = self.dtype if whole else self.value_dtype
                total[i] += self._send(worker, i, local_rate * g, k, value_dtype)
        for w, t in zip(self.weights, total, strict=True):
            w -= common_rate * t
        self.iteration += 1

    def _current_rate(self):
        return self.rate_at(self.iteration) if self.rate_at else self.learning_rate

    @property
    def rates(self):
        """Factor of a gradient before it accumulates, and factor of the sum."""
        pair = self.learning_rate, 1.0
        return pair if self.scales_first else pair[::-1]

    def _is_uncompressed(self, tensor):
        return tensor.ndim < 2 or tensor.size < self.min_compress_size

    def _count(self, tensor, sparsity):
        if self._is_uncompressed(tensor):
            return tensor.size
        return max(1, math.ceil(round((1 - sparsity) * tensor.size, 5)))

    def _goes_dense(self, counts, sparsity):
        layout = [
            (
                w.size,
                self.dtype,
                "exempt" if self._is_uncompressed(w) else self.value_dtype,
            )
            for w in self.weights
        ]
        sparse = wire_reference.length(layout, counts)
        words_per_entry = np.dtype(self.dtype).itemsize // 4
        dense = (1 + sum(w.size for w in self.weights)) * words_per_entry
        return sparsity == 0 or self.num_workers * sparse > 2 * dense

    def _send(self, worker, i, gradient, k, value_dtype):
        velocity, residual = worker.velocity[i], worker.residual[i]
        m = self.momentum
        if self.nesterov:
            velocity[...] = m * (velocity + gradient)
            residual += velocity + gradient
        else:
            velocity[...] = m * velocity + gradient
            residual += velocity
        offset = self.tie_offsets(self.iteration)[i]
        cyclic = (np.arange(residual.size) - offset) % residual.size
        # In ascending order, in which blocks of entries may share a scale.
        sent = np.sort(np.lexsort((cyclic, -np.abs(residual.ravel())))[:k])
        out = np.zeros_like(residual)
        out.flat[sent] = wire_reference.rounded(residual.flat[sent], value_dtype)
        residual.flat[sent] -= out.flat[sent]
        masking = self.factor_masking
        if masking is None:
            masking = self.sparsity(self.iteration) >= 0.99
        if masking and k < residual.size:
            velocity.flat[sent] = 0
        return out
