"""Rows of `tf-dgc methods` and `tf-dgc collectives`, from the classes of the package.

`python -m tf_dgc.cli.tables` writes those for the default options to `tables.json`, so
that these commands need not load TensorFlow.
"""

import dataclasses
import json
import math

import tensorflow as tf

from tf_dgc import collectives
from tf_dgc.cli import listing
from tf_dgc.cli.listing import CollectiveRow, MethodRow, Tables
from tf_dgc.collectives import Cost
from tf_dgc.compressors import METHODS, Compressor


def default_tables() -> Tables:
    """Return the rows for the default options of the commands."""
    return Tables(method_rows(listing.SIZE), collective_rows(listing.WORKERS))


def method_rows(size: int) -> list[MethodRow]:
    """Return the row of every method for float32 matrices of `size` entries."""
    shape = listing.as_matrix(size)
    return [_method_row(METHODS[name](), shape) for name in sorted(METHODS)]


def collective_rows(num_workers: int) -> list[CollectiveRow]:
    """Return the row of every collective algorithm for some number of workers."""
    return [_collective_row(name, num_workers) for name in collectives.names()]


def _method_row(compressor: Compressor, shape: tuple[int, ...]) -> MethodRow:
    sent = compressor.bytes(shape, tf.float32)
    return MethodRow(
        compressor.name,
        compressor.kind,
        "varies" if sent is None else f"{sent / math.prod(shape):.4g}",
        compressor.error_feedback,
        compressor.reference,
        ", ".join({**compressor.state(shape), **compressor.common_state()}) or "-",
    )


def _collective_row(name: str, num_workers: int) -> CollectiveRow:
    algorithm = collectives.get(name)
    reduce = algorithm.cost_of_sum(1, num_workers)
    gather = algorithm.cost_of_gather(1, num_workers)
    entries = (
        algorithm.cost_of_merge(1, num_workers) if algorithm.drops_entries else gather
    )
    return CollectiveRow(
        name,
        str(reduce.rounds),
        _payloads(reduce),
        str(gather.rounds),
        _payloads(gather),
        str(entries.rounds),
        _payloads(entries),
        algorithm.reference,
    )


def _payloads(cost: Cost) -> str:
    return f"{cost.sent:.4g}"


if __name__ == "__main__":
    text = json.dumps(dataclasses.asdict(default_tables()), indent=1)
    listing.TABLES.write_text(text + "\n", encoding="utf-8")
