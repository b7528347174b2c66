"""What methods of low rank have in common: which matrix a tensor is."""

import math


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns; columns are the last axis, Keras's output features."""
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]
