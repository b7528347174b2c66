"""Conditions around all replicas, as one within a replica may not ask for others."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def call_if(choice: tf.Tensor, function: Callable, args: tuple = ()) -> None:
    """Call a function in replica context, if so; call this in replica context too.

    Args:
        choice: choice that is the same on all replicas, a scalar bool tensor.
        function: function that may ask for other replicas, the same on all of them.
        args: arguments of it, nested structures of tensors of this replica.
    """

    def call(strategy: tf.distribute.Strategy, choice: Any, args: Any) -> None:
        def by_all() -> tf.Tensor:
            strategy.extended.call_for_each_replica(function, args)
            return tf.constant(True)

        first = strategy.experimental_local_results(choice)[0]
        tf.cond(first, by_all, lambda: tf.constant(True))

    context = tf.distribute.get_replica_context()
    context.merge_call(call, args=(choice, args))
