"""Conditions whose branches may use collectives or cross-replica updates.

`tf.cond` within a replica does not allow these, so the condition is built around all
replicas. Call the functions in replica context.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def cond_in_all_replicas(
    condition: tf.Tensor, function: Callable[..., None], args: tuple[Any, ...] = ()
) -> None:
    """Call a function on all replicas if a condition holds.

    Args:
        condition: scalar bool, equal on all replicas.
        function: function that is called in replica context.
        args: its arguments, nested structures of this replica's tensors.
    """

    def call(strategy: tf.distribute.Strategy, condition: Any, args: Any) -> None:
        def call_on_replicas() -> tf.Tensor:
            strategy.extended.call_for_each_replica(function, args)
            return tf.constant(True)

        first = strategy.experimental_local_results(condition)[0]
        tf.cond(first, call_on_replicas, lambda: tf.constant(True))

    context = tf.distribute.get_replica_context()
    context.merge_call(call, args=(condition, args))


def switch_in_all_replicas(
    index: tf.Tensor, functions: Sequence[Callable[[], None]]
) -> None:
    """Call one of several functions on all replicas; `index` is equal on all."""
    if len(functions) == 1:
        functions[0]()
        return

    def call(strategy: tf.distribute.Strategy, index: Any) -> None:
        def call_on_replicas(function: Callable[[], None]) -> tf.Tensor:
            strategy.extended.call_for_each_replica(function)
            return tf.constant(True)

        first = strategy.experimental_local_results(index)[0]
        branches = [functools.partial(call_on_replicas, f) for f in functions]
        tf.switch_case(tf.cast(first, tf.int32), branches)

    tf.distribute.get_replica_context().merge_call(call, args=(index,))
