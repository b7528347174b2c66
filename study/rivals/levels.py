"""Other ways to say how much top-k sends, for `horizons.py` to compare with."""

import math

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.collectives.requests import AllReduce
from tf_dgc.compressors import Sparsifier, StateSpec, TopK
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.largest import top_k
from tf_dgc.compressors.topk import num_sent, tie_offset

MOST = 0.25  # share of a tensor that is sent at most, that of the paper's first stage
_SLOWNESS = 0.1  # power of the residual's distance from its level, a factor per step


class _ByStep(Sparsifier):
    """Sends as many of the largest entries of a tensor as is found in the step."""

    limits_magnitudes = True

    def __init__(self, value_dtype=None):
        self.value_dtype = value_dtype

    def bytes(self, shape, dtype):
        """Return None: that is found in each step."""

    def _send(self, values, k, draw):
        values = tf.reshape(values, [-1])
        positions, _ = top_k(values, k, tie_offset(values.shape[0], draw))
        dtype = self.value_dtype or values.dtype.name
        return (
            yield from sparse.send_entries(
                values, positions, k, dtype, draw.max_magnitude
            )
        )


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class HardThreshold(_ByStep):
    """Sends what is above a threshold, and so more or less by step and by tensor.

    Sahu et al., "Rethinking gradient sparsification as total error minimization",
    NeurIPS 2021: one threshold for all steps and tensors. Workers' messages are of one
    length: each sends as many of its largest entries as are above it on average.

    Args:
        threshold: lambda, above 0, in units of updates.
        value_dtype: type of the values, as of `TopK`.
    """

    name = "hard_threshold"
    reference = "Sahu et al., Rethinking gradient sparsification, NeurIPS 2021"

    def __init__(self, threshold=1e-3, value_dtype=None):
        super().__init__(value_dtype)
        self.threshold = threshold

    def aggregate(self, values, state, draw):
        """Count, agree on how many, and send."""
        above = tf.abs(values) > self.threshold
        counted = yield AllReduce(tf.reduce_sum(tf.cast(above, tf.float32))[tf.newaxis])
        mean = tf.cast(tf.round(counted[0] / draw.num_workers), tf.int32)
        size = values.shape.num_elements()
        k = tf.clip_by_value(mean, 1, max(1, int(MOST * size)))
        return (yield from self._send(values, k, draw))

    def get_config(self):
        """Return the constructor's arguments."""
        return {"threshold": self.threshold, "value_dtype": self.value_dtype}


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class ResidualLevel(_ByStep):
    """Sends a quarter of each tensor at first, and less until enough waits.

    A warm-up by the residual's norm instead of by steps: the density of a tensor falls
    while the residual is below a level, `level` times the largest norm of what a step
    added so far, and rises above it.

    Args:
        level: norm of the residual that is aimed at, in units of the largest step's.
        value_dtype: type of the values, as of `TopK`.
    """

    name = "residual_level"
    reference = "A warm-up by the norm of the residual"
    reads_residual = True

    def __init__(self, level=3.0, value_dtype=None):
        super().__init__(value_dtype)
        self.level = level

    def state(self, shape):
        """Return density and largest norm of a step, which all have alike."""
        return {
            "density": StateSpec((1,), per_worker=False, initial=_first_density),
            "largest": StateSpec((1,), per_worker=False),
        }

    def aggregate(self, values, state, draw):
        """Move the density by the workers' norms, and send."""
        residual = state["residual"]
        squares = [tf.reduce_sum(x**2) for x in (residual, values - residual)]
        waits, step = tf.unstack(tf.sqrt((yield AllReduce(tf.stack(squares)))))
        largest = tf.maximum(state["largest"], step)
        share = tf.math.divide_no_nan(waits, self.level * largest)
        least = 1 / values.shape.num_elements()
        density = state["density"] * tf.where(largest > 0, share, 1) ** _SLOWNESS
        density = tf.clip_by_value(density, min(least, MOST), MOST)
        k = num_sent(values.shape.num_elements(), 1 - tf.cast(density[0], tf.float64))
        result = yield from self._send(values, k, draw)
        return result._replace(state={"density": density, "largest": largest})

    def get_config(self):
        """Return the constructor's arguments."""
        return {"level": self.level, "value_dtype": self.value_dtype}


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class RootTopK(Sparsifier):
    """Top-k of each tensor with k in proportion to the root of its size.

    A sparsity by layer: of a tensor of four times the entries twice as many are sent.

    Args:
        roots: number c, of n entries `c * sqrt(n)` are sent.
        value_dtype: type of the values, as of `TopK`.
    """

    name = "root_top_k"
    reference = "A sparsity by layer"
    limits_magnitudes = True

    def __init__(self, roots=1.0, value_dtype=None):
        self.roots, self.value_dtype = roots, value_dtype

    @classmethod
    def like(cls, density, sizes, value_dtype):
        """Return one that sends as many entries as a density of all tensors.

        Args:
            density: share of entries sent.
            sizes: entries of each tensor that is compressed.
            value_dtype: type of the values.
        """
        return cls(density * sum(sizes) / sum(map(math.sqrt, sizes)), value_dtype)

    def bytes(self, shape, dtype):
        """Return those of top-k."""
        return self._of(math.prod(shape)).bytes(shape, dtype)

    def aggregate(self, values, state, draw):
        """Do as top-k of this tensor's sparsity."""
        chosen = self._of(values.shape.num_elements())
        return (yield from chosen.aggregate(values, state, draw))

    def _of(self, size):
        return TopK(1 - min(MOST, self.roots / math.sqrt(size)), self.value_dtype)

    def get_config(self):
        """Return the constructor's arguments."""
        return {"roots": self.roots, "value_dtype": self.value_dtype}


def _first_density(random):
    del random
    return np.full([1], MOST)
