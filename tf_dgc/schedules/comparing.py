"""Comparing: whether schedules of several workers are the same.

The config of a function is its name, and there may be others of that name. At which
iterations it has an answer only the user knows, so it is traced, and asked for none.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

_NAMES = "container", "shared_name"  # of tables and variables, as they were made


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
    functions = {f.signature.name: f.node_def for f in graph.library.function}
    return zlib.crc32(repr(_describe(graph.node, functions)).encode())


def _describe(nodes: Iterable[Any], functions: Mapping[str, Any]) -> list[tuple]:
    """Return of each node its operation, attributes, and the places of its inputs."""
    nodes = list(nodes)
    places = {node.name: place for place, node in enumerate(nodes)}
    return [
        (
            node.op,
            [(n, _value(node.attr[n], functions)) for n in _compared(node)],
            [places.get(name.lstrip("^").split(":")[0], -1) for name in node.input],
        )
        for node in nodes
    ]


def _compared(node: Any) -> list[str]:
    """Return the attributes of a node that say what it does, sorted."""
    return sorted(n for n in node.attr if n[0] != "_" and n not in _NAMES)


def _value(attribute: Any, functions: Mapping[str, Any]) -> Any:
    """Return what an attribute is, of functions what they do."""
    called = [attribute.func, *attribute.list.func]
    names = [function.name for function in called if function.name]
    if not names:
        return zlib.crc32(attribute.SerializeToString())
    # One that calls itself is described once, and as nothing within.
    rest = {name: nodes for name, nodes in functions.items() if name not in names}
    return [_describe(functions.get(name, []), rest) for name in names]
