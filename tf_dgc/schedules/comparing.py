"""Comparing: whether schedules of several workers are the same.

The config of a function is its name, and there may be others of that name. At which
iterations it has an answer only the user knows, so it is traced, and asked for none.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


def fingerprint(schedule: Callable[[tf.Tensor], Any]) -> int:
    """Return a CRC-32 of the operations and constants that a schedule is made of.

    Not of their names, which depend on what was traced before.

    Args:
        schedule: function of the iteration, a scalar int64 tensor.

    Returns:
        The number; 0 if it cannot be traced, but only be called.
    """

    def asked(iteration: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(schedule(iteration))

    try:
        with tf.init_scope():
            traced = tf.function(asked).get_concrete_function(
                tf.TensorSpec([], tf.int64)
            )
    except Exception:  # whatever a user's function raises where it is not eager
        return 0
    graph = traced.graph.as_graph_def()
    functions = [_describe(f.node_def) for f in graph.library.function]
    return zlib.crc32(repr([_describe(graph.node), sorted(functions)]).encode())


def _describe(nodes: Iterable[Any]) -> list[tuple]:
    """Return of each node its operation, constant, and the places of its inputs."""
    nodes = list(nodes)
    places = {node.name: place for place, node in enumerate(nodes)}
    return [
        (
            node.op,
            zlib.crc32(node.attr["value"].SerializeToString()),
            [places.get(name.lstrip("^").split(":")[0], -1) for name in node.input],
        )
        for node in nodes
    ]
