"""Sparsity schedules that send as many bytes as DGC with the paper's warm-up."""

import itertools
import math

import tensorflow as tf
from training.trainer import is_uncompressed

import tf_dgc
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps.base import plan_step

WARMUP = 0.2
"""Share of a run in which the run `dgc` warms up."""
_HALVINGS = 40


class Budget:
    """The bytes of a DGC run at 99.9 %, with the paper's warm-up in the first fifth.

    Args:
        shapes: shapes of the model's variables.
        steps: number of steps of the run.
        workers: number of workers.
    """

    def __init__(self, shapes, steps, workers):
        self._shapes, self.steps, self._workers = shapes, steps, workers
        self.bytes = self.total(
            tf_dgc.schedules.PiecewiseConstantSparsity(*paper(steps))
        )

    @property
    def compressed(self):
        """Number of entries of each compressed tensor."""
        return [math.prod(s) for s in self._shapes if not is_uncompressed(s)]

    def total(self, schedule, together=False, **options):
        """Return the bytes that one worker passes to collectives in a run.

        Args:
            schedule: a `PiecewiseConstantSparsity`.
            together: whether the largest entries of all tensors together are sent.
            **options: `value_dtype` and `uncompressed_dtype`.
        """
        tensors = self._layout(together, **options)
        ends = [*schedule.boundaries, self.steps]
        lengths = [b - a for a, b in itertools.pairwise([0, *ends])]
        sent = [plan_step(tensors, s, self._workers).num_bytes for s in schedule.values]
        return sum(n * size for n, size in zip(lengths, sent, strict=True))

    def fit(self, shape, together=False, share=1.0, **options):
        """Return the schedule of a shape that spends the budget, or slightly less.

        Args:
            shape: function of a density and of the number of steps that returns
                boundaries and sparsities.
            together: whether the largest entries of all tensors together are sent.
            share: share of the budget to spend.
            **options: `value_dtype` and `uncompressed_dtype`.
        """
        low, high = math.log(1e-4), 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            spent = self.total(self._schedule(shape, middle), together, **options)
            low, high = (low, middle) if spent > share * self.bytes else (middle, high)
        return self._schedule(shape, low)

    def _schedule(self, shape, log_density):
        boundaries, values = shape(math.exp(log_density), self.steps)
        return tf_dgc.schedules.PiecewiseConstantSparsity(boundaries, values)

    def _layout(self, together, value_dtype=None, uncompressed_dtype=None):
        sizes = [math.prod(shape) for shape in self._shapes]
        uncompressed = list(map(is_uncompressed, self._shapes))
        if together:
            total = sum(self.compressed)
            sizes = [n for n, u in zip(sizes, uncompressed, strict=True) if u] + [total]
            uncompressed = [True] * (len(sizes) - 1) + [False]
        return [
            TensorSpec("", (n,), tf.float32, u, value_dtype, uncompressed_dtype)
            for n, u in zip(sizes, uncompressed, strict=True)
        ]


def paper(steps, final=0.001):
    """Return boundaries and sparsities of the paper's warm-up in the first fifth."""
    warmup = tf_dgc.schedules.WarmupSparsity(max(1, int(steps * WARMUP)), 1 - final)
    inner = warmup._piecewise
    return inner.boundaries, inner.values


def warm_up(final, steps):
    """Shape for `Budget.fit`: the paper's warm-up, then a constant density."""
    return paper(steps, min(final, 0.999))


def constant(density, steps):
    """Shape for `Budget.fit`: one density in all steps."""
    return [], [1 - density]


def staged(*stages):
    """Return a shape of stages for `Budget.fit`.

    Args:
        *stages: for each stage, the share of the run at which it ends, and its factor
            of the density.
    """

    def shape(density, steps):
        ends = [round(end * steps) for end, _ in stages[:-1]]
        return ends, [1 - min(1.0, density * factor) for _, factor in stages]

    return shape


def flushed(shape, *shares):
    """Return a shape with single steps that send everything.

    Args:
        shape: shape of all other steps.
        *shares: for each such step, the share of the run before it.
    """

    def flushed_shape(density, steps):
        boundaries, values = shape(density, steps)
        for share in shares:
            step = min(steps - 1, round(share * steps))
            index = sum(boundary <= step for boundary in boundaries)
            boundaries = [*boundaries[:index], step, step + 1, *boundaries[index:]]
            values = [*values[: index + 1], 0.0, *values[index:]]
        return boundaries, values

    return flushed_shape
