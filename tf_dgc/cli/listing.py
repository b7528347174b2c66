"""Listing: the compression methods and the exchanges, and what each of them costs."""

import math
from collections.abc import Iterable

import tensorflow as tf

from tf_dgc import collectives
from tf_dgc.collectives import Cost
from tf_dgc.compressors import METHODS, Compressor

_COLUMNS = ("name", "kind", "bytes/element", "state", "error feedback", "reference")
_OF_EXCHANGES = ("name", "of a sum", "of a gather", "of DGC's entries", "reference")


def main(size: int) -> int:
    """Print the table for float32 matrices of `size` entries."""
    shape = as_matrix(size)
    print(f"Defaults, for a matrix of {shape[0]} x {shape[1]} float32 entries:\n")
    print(
        text_table(
            _COLUMNS, [method_row(METHODS[name](), shape) for name in sorted(METHODS)]
        )
    )
    return 0


def list_exchanges(num_workers: int) -> int:
    """Print the table of exchanges for so many workers."""
    print(
        f"Rounds, and the most that one of {num_workers} workers sends, in payloads "
        "of a worker:\n"
    )
    names = collectives.names()
    print(text_table(_OF_EXCHANGES, [_row_of(name, num_workers) for name in names]))
    return 0


def _row_of(name: str, num_workers: int) -> tuple[str, ...]:
    exchange = collectives.get(name)
    gather = exchange.cost_of_gather(1, num_workers)
    merge = exchange.cost_of_merge if exchange.drops_entries else None
    return (
        name,
        _cost(exchange.cost_of_sum(1, num_workers)),
        _cost(gather),
        _cost(merge(1, num_workers) if merge else gather),
        exchange.reference,
    )


def _cost(cost: Cost) -> str:
    return f"{cost.rounds}, {cost.sent:.4g}"


def method_row(compressor: Compressor, shape: tuple[int, ...]) -> tuple[str, ...]:
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
        ", ".join({**compressor.state(shape), **compressor.common_state()}) or "-",
        compressor.error_feedback,
        compressor.reference,
    )


def text_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows below the names of the columns, aligned."""
    lines = [columns, *rows]
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
