"""Schedules of the sparsity that spend as many bytes as DGC's usual warm-up does."""

import itertools
import math

import tensorflow as tf
from training.trainer import is_uncompressed

import tf_dgc
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.steps.base import plan_step

WARMUP = 0.2
"""Share of a run in which today's `dgc` warms up."""
_HALVINGS = 40


class Budget:
    """The bytes of a run by DGC at 99.9 %, with the paper's warm-up in the first fifth.

    Args:
        shapes: those of the model's variables.
        steps: of the run.
        workers: of the run.
    """

    def __init__(self, shapes, steps, workers):
        self._shapes, self.steps, self._workers = shapes, steps, workers
        self.bytes = self.total(
            tf_dgc.schedules.PiecewiseConstantSparsity(*paper(steps))
        )

    @property
    def compressed(self):
        """Entries of each tensor that is compressed."""
        return [math.prod(s) for s in self._shapes if not is_uncompressed(s)]

    def total(self, schedule, together=False, **options):
        """Return the bytes that one worker hands over in a run.

        Args:
            schedule: a `PiecewiseConstantSparsity`.
            together: whether entries are chosen among those of all tensors.
            **options: `value_dtype` and `uncompressed_dtype`.
        """
        tensors = self._layout(together, **options)
        ends = [*schedule.boundaries, self.steps]
        lengths = [b - a for a, b in itertools.pairwise([0, *ends])]
        sent = [plan_step(tensors, s, self._workers).num_bytes for s in schedule.values]
        return sum(n * size for n, size in zip(lengths, sent, strict=True))

    def fit(self, shape, together=False, share=1.0, **options):
        """Return the schedule of a shape that spends the budget, or just less.

        Args:
            shape: function of a density and of the number of steps that returns
                boundaries and sparsities.
            together: whether entries are chosen among those of all tensors.
            share: of the budget that is to be spent.
            **options: `value_dtype` and `uncompressed_dtype`.
        """
        low, high = math.log(1e-4), 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            spent = self.total(self._made(shape, middle), together, **options)
            low, high = (low, middle) if spent > share * self.bytes else (middle, high)
        return self._made(shape, low)

    def _made(self, shape, density):
        found = shape(math.exp(density), self.steps)
        return tf_dgc.schedules.PiecewiseConstantSparsity(*found)

    def _layout(self, together, value_dtype=None, uncompressed_dtype=None):
        sizes = [math.prod(shape) for shape in self._shapes]
        uncompressed = list(map(is_uncompressed, self._shapes))
        if together:
            whole = sum(n for n, e in zip(sizes, uncompressed, strict=True) if not e)
            sizes = [n for n, e in zip(sizes, uncompressed, strict=True) if e] + [whole]
            uncompressed = [True] * (len(sizes) - 1) + [False]
        return [
            TensorSpec("", (n,), tf.float32, e, value_dtype, uncompressed_dtype)
            for n, e in zip(sizes, uncompressed, strict=True)
        ]


def paper(steps, final=0.001):
    """Return boundaries and sparsities of the paper's warm-up in the first fifth."""
    warmup = tf_dgc.schedules.WarmupSparsity(max(1, int(steps * WARMUP)), 1 - final)
    inner = warmup._piecewise
    return inner.boundaries, inner.values


def warm_up(final, steps):
    """Return a shape: the paper's warm-up, then a density that is to be found."""
    return paper(steps, min(final, 0.999))


def constant(density, steps):
    """Return a shape: one density from beginning to end."""
    return [], [1 - density]


def staged(*stages):
    """Return a shape of stages.

    Args:
        *stages: the share of the run at which each ends, and the multiple of the
            density in it.
    """

    def shape(density, steps):
        ends = [round(end * steps) for end, _ in stages[:-1]]
        return ends, [1 - min(1.0, density * times) for _, times in stages]

    return shape


def flushed(shape, *shares):
    """Return a shape with single steps that send everything.

    Args:
        shape: to put them into.
        *shares: of the run that are done before each.
    """

    def with_them(density, steps):
        boundaries, values = shape(density, steps)
        for share in shares:
            at = min(steps - 1, round(share * steps))
            place = sum(b <= at for b in boundaries)
            boundaries = [*boundaries[:place], at, at + 1, *boundaries[place:]]
            values = [*values[: place + 1], 0.0, *values[place:]]
        return boundaries, values

    return with_them
