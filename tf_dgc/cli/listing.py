"""Listing: the compression methods, and what each of them costs."""

import math
from collections.abc import Iterable

import tensorflow as tf

from tf_dgc.compressors import METHODS, Compressor

_COLUMNS = ("name", "kind", "bytes/element", "state", "error feedback", "reference")


def main(size: int) -> int:
    """Print the table for float32 matrices of `size` entries."""
    shape = as_matrix(size)
    print(f"Defaults, for a matrix of {shape[0]} x {shape[1]} float32 entries:\n")
    print(table([row(METHODS[name](), shape) for name in sorted(METHODS)]))
    return 0


def row(compressor: Compressor, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the cells of one method.

    Args:
        compressor: method whose bytes are stated.
        shape: shape of the tensor that is sent.
    """
    sent = compressor.bytes(shape, tf.float32)
    each = "varies" if sent is None else f"{sent / math.prod(shape):.4g}"
    return (
        compressor.name,
        compressor.kind,
        each,
        ", ".join(compressor.state(shape)) or "-",
        compressor.error_feedback,
        compressor.reference,
    )


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows below the names of the columns, aligned."""
    lines = [_COLUMNS, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def as_matrix(size: int) -> tuple[int, int]:
    """Return the shape of `size` entries that is nearest to a square."""
    rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
    return rows, size // rows
