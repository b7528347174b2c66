"""ATOMO: a few random singular components whose expected sum is the gradient."""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.codecs.bits import to_words
from tf_dgc.collectives.requests import Aggregation, AllGather, Result
from tf_dgc.compressors.base import LowRank
from tf_dgc.compressors.common.low_rank import Sided, as_matrix, leading_subspace
from tf_dgc.compressors.common.one_round import from_words, send_whole, sum_decoded
from tf_dgc.compressors.random_keys import RandomKeys

_OVERSAMPLED = 8  # dimensions of the subspace beyond the budget


@keras.saving.register_keras_serializable(package="tf_dgc")
class ATOMO(LowRank):
    """Sends `budget` components of every gradient matrix, unbiased.

    Wang et al., spectral ATOMO: the gradient is `sum of lambda_i u_i v_i'`. Component i
    is sent with probability p_i, divided by p_i (equation 2). Algorithm 1 finds the
    p_i, whose sum is the budget, of least variance `sum of lambda_i^2 (1/p_i - 1)`:
    those of the largest components are 1, the others proportional to lambda_i.

    The paper decomposes the whole matrix M, which takes
    `rows * columns * min(rows, columns)` operations. Here products with random vectors
    find a subspace of `budget + 8` dimensions that contains the largest components
    (Halko et al., SIAM Review 2011, with one power iteration). Its singular components
    are the first atoms. Any orthonormal basis w_1 ... w_d of the orthogonal complement
    gives further atoms `w_j w_j' M`; with a random basis all have the same expected
    square, so for algorithm 1 their scale is the root of the square of M outside the
    subspace over d. All atoms are orthogonal and add up to M: whatever the subspace,
    the expected value is M, and only the variance depends on the subspace. It equals
    the paper's if the subspace contains the matrix, as it does if the smaller side is
    at most `budget + 8`, and never exceeds that of p_i = s/r.

    The paper draws components independently, so their number varies. Here systematic
    sampling draws exactly `budget` atoms: with intervals of lengths p_i laid end to
    end, it takes those that contain u, u + 1, u + 2, ... for one uniform u. That keeps
    every p_i, and so the expected value and, as atoms are orthogonal, the variance. If
    the rank is smaller, the remaining atoms are zeros.

    A payload has `budget * (rows + columns)` numbers. A tensor is a matrix as in
    `PowerSGD`, and sent whole if its factors are not smaller.

    Args:
        budget: number of components s; in the paper their expected number.
    """

    name = "atomo"
    reference = "Wang et al., ATOMO, NeurIPS 2018"
    unbiased = True
    error_feedback = "forbidden"

    def __init__(self, budget: int = 3):
        self.budget = check_whole("budget", budget)

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of the components, or of the tensor if it is smaller."""
        rows, columns = as_matrix(shape)
        return dtype.size * min(rows * columns, self.budget * (rows + columns))

    def aggregate(
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
        # Scaled to 1 first, so that squares do not overflow.
        largest = tf.reduce_max(tf.abs(values))
        matrix = Sided.of(tf.math.divide_no_nan(values, largest))
        subspace, complement = self._bases(matrix, keys)
        subspace, scales = _decompose(matrix, subspace)
        order = tf.argsort(scales, direction="DESCENDING", stable=True)
        p = probabilities(tf.gather(scales, order), self.budget)
        start = tf.random.stateless_uniform([], keys.local(), dtype=tf.float64)
        marks = start + tf.range(self.budget, dtype=tf.float64)
        drawn = tf.searchsorted(tf.cumsum(p), marks, side="right")
        # Marks beyond the last atom, if there are few atoms, get weight 0.
        weights = tf.math.divide_no_nan(tf.ones_like(p), p)
        weights = tf.gather(tf.pad(weights, [[0, 1]]), drawn)
        atoms = tf.gather(tf.pad(order, [[0, 1]]), drawn)
        left = _left_vectors(subspace, complement, atoms)
        left = tf.where(matrix.has_entries()[:, tf.newaxis], left, 0)
        right = matrix.transposed_times(left)
        right *= tf.cast(weights, values.dtype) * largest
        return tf.concat([right, left] if matrix.flipped else [left, right], axis=0)

    def _bases(
        self, matrix: Sided, keys: RandomKeys
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return bases of the subspace, and of a part of its complement.

        The part has as many dimensions as may be drawn.
        """
        size, dtype = matrix.rows, matrix.values.dtype
        dimensions = self.budget + _OVERSAMPLED
        if dimensions >= size:
            return tf.eye(size, dtype=dtype), None
        subspace = leading_subspace(matrix, dimensions, keys.local(1))
        shape = [size, min(self.budget, size - dimensions)]
        random = tf.random.stateless_normal(shape, keys.local(2), dtype=dtype)
        basis = tf.linalg.qr(tf.concat([subspace, random], axis=1)).q
        return subspace, basis[:, dimensions:]

    def _decode(
        self, words: tf.Tensor, rows: int, columns: int, dtype: tf.DType
    ) -> tf.Tensor:
        return _product(from_words(words, dtype, [rows + columns, self.budget]), rows)

    def error_bound(self, size: int) -> float:
        """Return `r/s - 1`, the bound for p_i = s/r, with rank r at most `sqrt(n)`."""
        return max(0.0, math.isqrt(size) / self.budget - 1)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"budget": self.budget}


def probabilities(scales: tf.Tensor, budget: int) -> tf.Tensor:
    """Return the p_i of algorithm 1.

    The k largest have probability 1, the others `(s - k) lambda_i` over the sum of the
    remaining lambda; k is the smallest for which none of these exceeds 1.

    Args:
        scales: singular values lambda, descending, 0 or more, float `[r]`.
        budget: number of components s, below r.

    Returns:
        `[r]`, of sum s unless fewer than s of the scales are above 0.
    """
    remaining = tf.cumsum(scales, reverse=True)
    budgets = budget - tf.range(tf.size(scales))
    fits = scales * tf.cast(budgets, scales.dtype) <= remaining
    k = tf.argmax(fits, output_type=tf.int32)
    share = tf.math.divide_no_nan(scales, remaining[k])
    p = tf.minimum(share * tf.cast(budgets[k], scales.dtype), 1)
    return tf.where(tf.range(tf.size(scales)) < k, tf.ones_like(p), p)


def _decompose(matrix: Sided, subspace: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the left vectors of a subspace's atoms, and the scales of all atoms.

    Args:
        matrix: matrix of m rows.
        subspace: orthonormal basis of the subspace, `[m, r]`.

    Returns:
        `[m, r]`, and float64 `[m]`, with the scales of the complement's atoms last.
    """
    dtype, others = subspace.dtype, matrix.rows - subspace.shape[1]
    images = tf.cast(matrix.transposed_times(subspace), tf.float64)
    scales, _, rotation = tf.linalg.svd(tf.linalg.qr(images).r)
    square = 2 * tf.cast(tf.nn.l2_loss(matrix.values), tf.float64)
    # At least rounding errors, so that these are drawn sometimes, too.
    eps = float(np.finfo(dtype.as_numpy_dtype).eps)
    scales = tf.maximum(scales, eps * tf.sqrt(square))
    if others:
        outside = tf.maximum(square - tf.reduce_sum(scales**2), 4 * eps * square)
        complement_scales = tf.fill([others], tf.sqrt(outside / others))
        scales = tf.concat([scales, complement_scales], axis=0)
    return tf.linalg.matmul(subspace, tf.cast(rotation, dtype)), scales


def _left_vectors(
    subspace: tf.Tensor, complement: tf.Tensor | None, atoms: tf.Tensor
) -> tf.Tensor:
    """Return the left vectors of some atoms, `[m, budget]`.

    Atoms of the complement are interchangeable, so they are taken in order.
    """
    size = subspace.shape[1]
    if complement is None:
        return tf.gather(subspace, tf.minimum(atoms, size - 1), axis=1)
    is_outside = atoms >= size
    number = tf.cumsum(tf.cast(is_outside, atoms.dtype)) - 1
    number = tf.clip_by_value(number, 0, complement.shape[1] - 1)
    columns = tf.where(is_outside, size + number, atoms)
    return tf.gather(tf.concat([subspace, complement], axis=1), columns, axis=1)


def _product(factors: tf.Tensor, rows: int) -> tf.Tensor:
    return tf.linalg.matmul(factors[:rows], factors[rows:], transpose_b=True)
