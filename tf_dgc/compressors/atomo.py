"""ATOMO: a few singular components, drawn so that the expectation is the gradient."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import Compressor
from tf_dgc.compressors.common.low_rank import Sided, as_matrix, leading_subspace
from tf_dgc.compressors.common.one_round import (
    from_words,
    send_whole,
    sum_decoded,
    to_words,
)
from tf_dgc.compressors.random_keys import RandomKeys

_OVERSAMPLED = 8  # dimensions of the subspace beyond the budget


@keras.saving.register_keras_serializable(package="tf_dgc")
class ATOMO(Compressor):
    """Sends `budget` components of every gradient matrix, without bias.

    Wang et al., spectral ATOMO: the gradient is `sum of lambda_i u_i v_i'`, component i
    is kept with probability p_i and divided by it (equation 2). Algorithm 1 finds the
    p_i, whose sum is the budget, with the least variance,
    `sum of lambda_i^2 (1/p_i - 1)`: those of the largest components are 1, the others
    are in proportion to lambda_i.

    The paper decomposes the whole matrix M, which takes
    `rows * columns * min(rows, columns)` operations. Here a subspace of `budget + 8`
    dimensions is found that holds its largest components, by products with random
    vectors (Halko et al., SIAM Review 2011, with one power iteration), and decomposed:
    these are the first atoms. Of what is orthogonal to it, any orthonormal basis
    w_1 ... w_d gives atoms too, `w_j w_j' M`, and a basis drawn at random gives all of
    them the same expected square. So algorithm 1 sees these d with a scale each of the
    root of what is outside by d. All atoms add up to M and are orthogonal to each
    other: whatever the subspace, the expectation is M, and only the variance depends on
    how good it is. It is the paper's where the subspace holds the matrix, as it does if
    the smaller side is at most `budget + 8`, and never above that of p_i = s/r.

    The paper draws every component for itself, so their number varies. Here they are
    drawn together, by systematic sampling: one uniform number u, and the atoms in
    which u, u + 1, u + 2, ... fall when intervals of lengths p_i are laid end to end.
    That keeps every p_i, and with them the expectation and, as the atoms are
    orthogonal, the variance; but exactly `budget` atoms are drawn, so nothing is
    ever cut off. Fewer are sent (the rest being zeros) if the rank is smaller.

    On the wire are `budget * (rows + columns)` numbers. A tensor is a matrix as in
    `PowerSGD`; one whose factors are no smaller than itself is sent whole.

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
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Decompose, draw and gather."""
        del state
        rows, columns = as_matrix(tuple(values.shape))
        if self.budget * (rows + columns) >= rows * columns:
            return (yield from send_whole(values, self.aggregation))
        factors = self._draw(tf.reshape(values, [rows, columns]), keys)
        gathered = yield AllGather(to_words(factors))
        total = sum_decoded(
            gathered,
            lambda words: self._decode(words, rows, columns, values.dtype),
            [rows, columns],
            values.dtype,
        )
        return Result(total, _product(factors, rows))

    def _draw(self, values: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        """Return factors, `[rows + columns, budget]`."""
        # Of what is scaled to 1 first: squares of large numbers overflow.
        largest = tf.reduce_max(tf.abs(values))
        matrix = Sided.of(tf.math.divide_no_nan(values, largest))
        inside, others = self._bases(matrix, keys)
        inside, scales = _decompose(matrix, inside)
        order = tf.argsort(scales, direction="DESCENDING", stable=True)
        odds = probabilities(tf.gather(scales, order), self.budget)
        start = tf.random.stateless_uniform([], keys.local(), dtype=tf.float64)
        marks = start + tf.range(self.budget, dtype=tf.float64)
        drawn = tf.searchsorted(tf.cumsum(odds), marks, side="right")
        # Beyond the last atom, if there are fewer than the budget, is nothing.
        weights = tf.math.divide_no_nan(tf.ones_like(odds), odds)
        weights = tf.gather(tf.pad(weights, [[0, 1]]), drawn)
        left = _pick(inside, others, tf.gather(tf.pad(order, [[0, 1]]), drawn))
        left = tf.where(matrix.has_entries()[:, tf.newaxis], left, 0)
        right = matrix.transposed_times(left)
        right *= tf.cast(weights, values.dtype) * largest
        return tf.concat([right, left] if matrix.flipped else [left, right], axis=0)

    def _bases(
        self, matrix: Sided, keys: RandomKeys
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return bases of the subspace, and of as much beside it as may be drawn."""
        size, dtype = matrix.rows, matrix.values.dtype
        dimensions = self.budget + _OVERSAMPLED
        if dimensions >= size:
            return tf.eye(size, dtype=dtype), None
        inside = leading_subspace(matrix, dimensions, keys.local(1))
        shape = [size, min(self.budget, size - dimensions)]
        random = tf.random.stateless_normal(shape, keys.local(2), dtype=dtype)
        both = tf.linalg.qr(tf.concat([inside, random], axis=1)).q
        return inside, both[:, dimensions:]

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


def _decompose(matrix: Sided, inside: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the left vectors of the atoms of a subspace, and the scales of all atoms.

    Args:
        matrix: matrix of m rows.
        inside: orthonormal basis of the subspace, `[m, r]`.

    Returns:
        `[m, r]`, and float64 `[m]`, those of the atoms beside the subspace last.
    """
    dtype, others = inside.dtype, matrix.rows - inside.shape[1]
    images = tf.cast(matrix.transposed_times(inside), tf.float64)
    scales, _, turn = tf.linalg.svd(tf.linalg.qr(images).r)
    whole = 2 * tf.cast(tf.nn.l2_loss(matrix.values), tf.float64)
    # What is lost in rounding is drawn now and then, too.
    unit = float(np.finfo(dtype.as_numpy_dtype).eps)
    scales = tf.maximum(scales, unit * tf.sqrt(whole))
    if others:
        rest = tf.maximum(whole - tf.reduce_sum(scales**2), 4 * unit * whole)
        beside = tf.fill([others], tf.sqrt(rest / others))
        scales = tf.concat([scales, beside], axis=0)
    return tf.linalg.matmul(inside, tf.cast(turn, dtype)), scales


def _pick(inside: tf.Tensor, others: tf.Tensor | None, drawn: tf.Tensor) -> tf.Tensor:
    """Return the left vectors of the atoms that were drawn, `[m, budget]`.

    Those beside the subspace are all alike, so they are taken one after the other.
    """
    if others is None:
        return tf.gather(inside, tf.minimum(drawn, inside.shape[1] - 1), axis=1)
    first, is_other = inside.shape[1], drawn >= inside.shape[1]
    number = tf.cumsum(tf.cast(is_other, drawn.dtype)) - 1
    number = tf.clip_by_value(number, 0, others.shape[1] - 1)
    columns = tf.where(is_other, first + number, drawn)
    return tf.gather(tf.concat([inside, others], axis=1), columns, axis=1)


def _product(factors: tf.Tensor, rows: int) -> tf.Tensor:
    return tf.linalg.matmul(factors[:rows], factors[rows:], transpose_b=True)
