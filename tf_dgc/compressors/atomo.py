"""ATOMO: a few singular components, drawn so that the expectation is the gradient."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.collectives.requests import Exchange, Gather, Result
from tf_dgc.compressors.base import Compressor, Draw
from tf_dgc.compressors.common.arguments import check_whole
from tf_dgc.compressors.common.low_rank import as_matrix
from tf_dgc.compressors.common.one_round import (
    from_words,
    send_whole,
    sum_decoded,
    to_words,
)


@keras.saving.register_keras_serializable(package="tf_dgc")
class ATOMO(Compressor):
    """Sends `budget` singular components of every gradient matrix, without bias.

    Wang et al., spectral ATOMO: the gradient is `sum of lambda_i u_i v_i'`, component i
    is kept with probability p_i and divided by it (equation 2). Algorithm 1 finds the
    p_i, whose sum is the budget, with the least variance,
    `sum of lambda_i^2 (1/p_i - 1)`: those of the largest components are 1, the others
    are in proportion to lambda_i.

    The paper draws every component for itself, so their number varies. Here they are
    drawn together, by systematic sampling: one uniform number u, and the components in
    which u, u + 1, u + 2, ... fall when intervals of lengths p_i are laid end to end.
    That keeps every p_i, and with them the expectation and, as the components are
    orthogonal, the variance; but exactly `budget` components are drawn, so nothing is
    ever cut off. Fewer are sent (the rest being zeros) if the rank is smaller.

    On the wire are `budget * (rows + columns)` numbers: `lambda_i / p_i u_i`, and v_i.
    A tensor is a matrix as in `PowerSGD`; one whose factors are no smaller than itself
    is sent whole. Every worker decomposes its own matrices, which takes
    `rows * columns * min(rows, columns)` operations.

    Args:
        budget: s, the expected number of components in the paper, here their number.
    """

    name = "atomo"
    kind = "low rank"
    reference = "Wang et al., ATOMO, NeurIPS 2018"
    unbiased = True
    error_feedback = "forbidden"

    def __init__(self, budget: int = 3):
        self.budget = check_whole("budget", budget)

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of the components, or of the tensor if that is less."""
        rows, columns = as_matrix(shape)
        return dtype.size * min(rows * columns, self.budget * (rows + columns))

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], draw: Draw
    ) -> Exchange:
        """Decompose, draw and gather."""
        del state
        rows, columns = as_matrix(tuple(values.shape))
        if self.budget * (rows + columns) >= rows * columns:
            return (yield from send_whole(values, self.aggregation))
        factors = self._draw(tf.reshape(values, [rows, columns]), draw.local())
        gathered = yield Gather(to_words(factors))
        total = sum_decoded(
            gathered,
            lambda words: self._decode(words, rows, columns, values.dtype),
            [rows, columns],
            values.dtype,
        )
        return Result(total, _product(factors, rows))

    def _draw(self, matrix: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Return factors, `[rows + columns, budget]`."""
        # Of what is scaled to 1 first: squares of large numbers overflow.
        largest = tf.reduce_max(tf.abs(matrix))
        scales, u, v = tf.linalg.svd(tf.math.divide_no_nan(matrix, largest))
        odds = probabilities(tf.cast(scales, tf.float64), self.budget)
        start = tf.random.stateless_uniform([], seed, dtype=tf.float64)
        marks = start + tf.range(self.budget, dtype=tf.float64)
        drawn = tf.searchsorted(tf.cumsum(odds), marks, side="right")
        # Beyond the last component, if there are fewer than the budget, is nothing.
        weights = tf.math.divide_no_nan(scales, tf.cast(odds, scales.dtype))
        weights = tf.gather(tf.pad(weights, [[0, 1]]), drawn) * largest
        u, v = (tf.gather(tf.pad(f, [[0, 0], [0, 1]]), drawn, axis=1) for f in (u, v))
        return tf.concat([u * weights, v], axis=0)

    def _decode(
        self, words: tf.Tensor, rows: int, columns: int, dtype: tf.DType
    ) -> tf.Tensor:
        return _product(from_words(words, dtype, [rows + columns, self.budget]), rows)

    def error_bound(self, size: int) -> float:
        """Return `r/s - 1`, that of p_i = s/r; the rank r is at most the root of n."""
        return max(0.0, math.isqrt(size) / self.budget - 1)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"budget": self.budget}


def probabilities(scales: tf.Tensor, budget: int) -> tf.Tensor:
    """Return the p_i of algorithm 1.

    With the k largest kept for sure, the others get `(s - k) lambda_i` over the sum of
    those left; k is the smallest for which none of them exceeds 1.

    Args:
        scales: singular values lambda, descending, 0 or more, float `[r]`.
        budget: number of components s, below r.

    Returns:
        `[r]`, of sum s unless fewer than s of the scales are above 0.
    """
    left = tf.cumsum(scales, reverse=True)
    rest = budget - tf.range(tf.size(scales))
    fits = scales * tf.cast(rest, scales.dtype) <= left
    kept = tf.argmax(fits, output_type=tf.int32)
    share = tf.math.divide_no_nan(scales, left[kept])
    odds = tf.minimum(share * tf.cast(rest[kept], scales.dtype), 1)
    return tf.where(tf.range(tf.size(scales)) < kept, tf.ones_like(odds), odds)


def _product(factors: tf.Tensor, rows: int) -> tf.Tensor:
    return tf.linalg.matmul(factors[:rows], factors[rows:], transpose_b=True)
