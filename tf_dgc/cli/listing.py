"""`tf-dgc methods` and `tf-dgc collectives`: tables with the cost of each."""

import math
from collections.abc import Iterable

import tensorflow as tf

from tf_dgc import collectives
from tf_dgc.collectives import Cost
from tf_dgc.compressors import METHODS, Compressor

_METHOD_COLUMNS = (
    "name",
    "kind",
    "bytes/element",
    "state",
    "error feedback",
    "reference",
)
_COLLECTIVE_COLUMNS = (
    "name",
    "of a sum",
    "of a gather",
    "of DGC's entries",
    "reference",
)


def main(size: int) -> int:
    """Print the table for float32 matrices of `size` entries."""
    shape = as_matrix(size)
    print(f"Defaults, for a matrix of {shape[0]} x {shape[1]} float32 entries:\n")
    rows = [_method_row(METHODS[name](), shape) for name in sorted(METHODS)]
    print(text_table(_METHOD_COLUMNS, rows))
    return 0


def list_collectives(num_workers: int) -> int:
    """Print the table of collective algorithms for some number of workers."""
    print(
        f"Rounds, and the most that one of {num_workers} workers sends, in payloads "
        "of a worker:\n"
    )
    rows = [_collective_row(name, num_workers) for name in collectives.names()]
    print(text_table(_COLLECTIVE_COLUMNS, rows))
    return 0


def _collective_row(name: str, num_workers: int) -> tuple[str, ...]:
    algorithm = collectives.get(name)
    gather = algorithm.cost_of_gather(1, num_workers)
    merge = algorithm.cost_of_merge if algorithm.drops_entries else None
    return (
        name,
        _cost(algorithm.cost_of_sum(1, num_workers)),
        _cost(gather),
        _cost(merge(1, num_workers) if merge else gather),
        algorithm.reference,
    )


def _cost(cost: Cost) -> str:
    return f"{cost.rounds}, {cost.sent:.4g}"


def _method_row(compressor: Compressor, shape: tuple[int, ...]) -> tuple[str, ...]:
    sent = compressor.bytes(shape, tf.float32)
    per_element = "varies" if sent is None else f"{sent / math.prod(shape):.4g}"
    return (
        compressor.name,
        compressor.kind,
        per_element,
        ", ".join({**compressor.state(shape), **compressor.common_state()}) or "-",
        compressor.error_feedback,
        compressor.reference,
    )


def text_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return an aligned table with a header."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def as_matrix(size: int) -> tuple[int, int]:
    """Return the most square shape with `size` entries."""
    rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
    return rows, size // rows
