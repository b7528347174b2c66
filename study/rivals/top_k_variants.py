"""Top-k with other rules for the number of entries sent, for `short_runs.py`."""

import math

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.collectives.requests import AllReduce
from tf_dgc.compressors import Sparsifier, StateSpec, TopK
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.largest import top_k
from tf_dgc.compressors.topk import num_sent, tie_offset

MAX_DENSITY = 0.25  # share of a tensor; that of the first stage of the paper's warm-up
_EXPONENT = 0.1  # the density changes by this power of residual norm / level per step


class _VariableTopK(Sparsifier):
    """Sends a number of entries that is computed in each step."""

    limits_magnitudes = True

    def __init__(self, value_dtype=None):
        self.value_dtype = value_dtype

    def bytes(self, shape, dtype):
        """Return None: it differs between steps."""

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
class HardThreshold(_VariableTopK):
    """Sends the entries above a threshold.

    Sahu et al., "Rethinking gradient sparsification as total error minimization",
    NeurIPS 2021: one threshold for all steps and tensors. As the workers' messages have
    the same length, each worker sends as many of its largest entries as exceed the
    threshold on average over workers.

    Args:
        threshold: lambda, above 0, in units of updates.
        value_dtype: type of the values, as in `TopK`.
    """

    name = "hard_threshold"
    reference = "Sahu et al., Rethinking gradient sparsification, NeurIPS 2021"

    def __init__(self, threshold=1e-3, value_dtype=None):
        super().__init__(value_dtype)
        self.threshold = threshold

    def aggregate(self, values, state, draw):
        """Average the number of entries above the threshold, and send that many."""
        above = tf.abs(values) > self.threshold
        count = yield AllReduce(tf.reduce_sum(tf.cast(above, tf.float32))[tf.newaxis])
        mean = tf.cast(tf.round(count[0] / draw.num_workers), tf.int32)
        size = values.shape.num_elements()
        k = tf.clip_by_value(mean, 1, max(1, int(MAX_DENSITY * size)))
        return (yield from self._send(values, k, draw))

    def get_config(self):
        """Return the constructor's arguments."""
        return {"threshold": self.threshold, "value_dtype": self.value_dtype}


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class ResidualLevel(_VariableTopK):
    """Controls the density of each tensor by the norm of its residual.

    A warm-up by the residual's norm instead of by steps: the density is a quarter at
    first, falls while the residual's norm is below its target, and rises above it. The
    target is `level` times the largest norm that a step has added so far.

    Args:
        level: target norm of the residual, in units of the largest step's norm.
        value_dtype: type of the values, as in `TopK`.
    """

    name = "residual_level"
    reference = "A warm-up by the norm of the residual"
    reads_residual = True

    def __init__(self, level=3.0, value_dtype=None):
        super().__init__(value_dtype)
        self.level = level

    def state(self, shape):
        """Return the density and the largest norm of a step, equal on all workers."""
        return {
            "density": StateSpec((1,), per_worker=False, initial=_first_density),
            "largest": StateSpec((1,), per_worker=False),
        }

    def aggregate(self, values, state, draw):
        """Adapt the density to the norms over all workers, and send."""
        residual = state["residual"]
        squares = [tf.reduce_sum(x**2) for x in (residual, values - residual)]
        norms = tf.sqrt((yield AllReduce(tf.stack(squares))))
        residual_norm, step_norm = tf.unstack(norms)
        largest = tf.maximum(state["largest"], step_norm)
        ratio = tf.math.divide_no_nan(residual_norm, self.level * largest)
        min_density = min(1 / values.shape.num_elements(), MAX_DENSITY)
        density = state["density"] * tf.where(largest > 0, ratio, 1) ** _EXPONENT
        density = tf.clip_by_value(density, min_density, MAX_DENSITY)
        k = num_sent(values.shape.num_elements(), 1 - tf.cast(density[0], tf.float64))
        result = yield from self._send(values, k, draw)
        return result._replace(state={"density": density, "largest": largest})

    def get_config(self):
        """Return the constructor's arguments."""
        return {"level": self.level, "value_dtype": self.value_dtype}


@keras.saving.register_keras_serializable(package="tf_dgc_benchmarks")
class RootTopK(Sparsifier):
    """Top-k with k proportional to the square root of a tensor's size.

    A tensor with four times as many entries sends twice as many.

    Args:
        roots: factor c: `c * sqrt(n)` of n entries are sent.
        value_dtype: type of the values, as in `TopK`.
    """

    name = "root_top_k"
    reference = "A sparsity by layer"
    limits_magnitudes = True

    def __init__(self, roots=1.0, value_dtype=None):
        self.roots, self.value_dtype = roots, value_dtype

    @classmethod
    def like(cls, density, sizes, value_dtype):
        """Return a compressor with this density over all tensors together.

        Args:
            density: share of entries sent.
            sizes: number of entries of each compressed tensor.
            value_dtype: type of the values.
        """
        return cls(density * sum(sizes) / sum(map(math.sqrt, sizes)), value_dtype)

    def bytes(self, shape, dtype):
        """Return the bytes of top-k."""
        return self._top_k(math.prod(shape)).bytes(shape, dtype)

    def aggregate(self, values, state, draw):
        """Aggregate by top-k with this tensor's sparsity."""
        top_k_of_size = self._top_k(values.shape.num_elements())
        return (yield from top_k_of_size.aggregate(values, state, draw))

    def _top_k(self, size):
        density = min(MAX_DENSITY, self.roots / math.sqrt(size))
        return TopK(1 - density, self.value_dtype)

    def get_config(self):
        """Return the constructor's arguments."""
        return {"roots": self.roots, "value_dtype": self.value_dtype}


def _first_density(random):
    del random
    return np.full([1], MAX_DENSITY)
