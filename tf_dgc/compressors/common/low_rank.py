"""Matrices and their leading subspaces, for methods of low rank."""

import math
from typing import NamedTuple

import tensorflow as tf


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns; columns are the last axis, outputs of Keras kernels."""
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


class Sided(NamedTuple):
    """A matrix whose rows are its shorter side, without a copy."""

    values: tf.Tensor
    flipped: bool  # whether `values` is the transpose

    @classmethod
    def of(cls, values: tf.Tensor) -> "Sided":
        """Wrap a tensor `[r, c]`."""
        return cls(values, values.shape[0] > values.shape[1])

    @property
    def rows(self) -> int:
        """Length m of the shorter side."""
        return int(min(self.values.shape))

    @property
    def columns(self) -> int:
        """Length n of the longer side."""
        return int(max(self.values.shape))

    def has_entries(self) -> tf.Tensor:
        """Return whether each row has a nonzero entry, bool `[m]`."""
        return tf.reduce_any(self.values != 0, axis=0 if self.flipped else 1)

    def times(self, right: tf.Tensor) -> tf.Tensor:
        """Return the product with a matrix `[n, k]`, `[m, k]`."""
        return tf.linalg.matmul(self.values, right, transpose_a=self.flipped)

    def transposed_times(self, left: tf.Tensor) -> tf.Tensor:
        """Return the product of the transpose with a matrix `[m, k]`, `[n, k]`."""
        return tf.linalg.matmul(self.values, left, transpose_a=not self.flipped)


def leading_subspace(matrix: Sided, dimensions: int, seed: tf.Tensor) -> tf.Tensor:
    """Return an orthonormal basis, `[m, dimensions]`, of most of a matrix.

    Halko et al., SIAM Review 2011, algorithm 4.4 with one power iteration. The matrix
    must be scaled so that squares do not overflow.
    """
    shape, dtype = [matrix.columns, dimensions], matrix.values.dtype
    start = tf.random.stateless_normal(shape, seed, dtype=dtype)
    basis = tf.linalg.qr(matrix.times(start)).q
    return tf.linalg.qr(matrix.times(matrix.transposed_times(basis))).q
