"""Conditions around all replicas, as one within a replica may not ask for others."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def cond_in_all_replicas(
    choice: tf.Tensor, function: Callable, args: tuple = ()
) -> None:
    """Call a function in replica context, if so; call this in replica context too.

    Args:
        choice: choice that is the same on all replicas, a scalar bool tensor.
        function: function that may ask for other replicas, the same on all of them.
        args: arguments of it, nested structures of tensors of this replica.
    """

    def call(strategy: tf.distribute.Strategy, choice: Any, args: Any) -> None:
        def all_workers_native() -> tf.Tensor:
            strategy.extended.call_for_each_replica(function, args)
            return tf.constant(True)

        first = strategy.experimental_local_results(choice)[0]
        tf.cond(first, all_workers_native, lambda: tf.constant(True))

    context = tf.distribute.get_replica_context()
    context.merge_call(call, args=(choice, args))


def switch_in_all_replicas(index: tf.Tensor, functions: Sequence[Callable]) -> None:
    """Call one of some functions in replica context; as `call_if`.

    Args:
        index: index of it, the same on all replicas, a scalar integer tensor.
        functions: functions as in `call_if`, without arguments.
    """
    if len(functions) == 1:
        functions[0]()
        return

    def call(strategy: tf.distribute.Strategy, index: Any) -> None:
        def all_workers_native(function: Callable) -> tf.Tensor:
            strategy.extended.call_for_each_replica(function)
            return tf.constant(True)

        first = strategy.experimental_local_results(index)[0]
        branches = [
            functools.partial(all_workers_native, function) for function in functions
        ]
        tf.switch_case(tf.cast(first, tf.int32), branches)

    tf.distribute.get_replica_context().merge_call(call, args=(index,))
