"""Conditions and counts that are resolved at trace time where possible.

Two kinds of conditions: within a replica (`smart_cond`), and around all replicas, for
branches that use collectives or cross-replica updates, which TensorFlow does not allow
in a `tf.cond` within a replica.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

BoolOrTensor: TypeAlias = bool | tf.Tensor

ASSERTION = "tf_dgc:"
"""First datum of this package's assertions; `failures` shows the rest as the error."""


def smart_cond(condition: BoolOrTensor, if_true: Callable, if_false: Callable) -> Any:
    """Call one of two functions: now if the condition is a bool, else by `tf.cond`."""
    if isinstance(condition, bool):
        return if_true() if condition else if_false()
    return tf.cond(condition, if_true, if_false)


def add_counts(counts: Iterable[int | tf.Tensor]) -> int | tf.Tensor:
    """Return the sum: an int if all counts are, else a scalar int64 tensor.

    TensorFlow would convert an int to the int32 of another count, and overflow.
    """
    counts = list(counts)
    if all(isinstance(count, int) for count in counts):
        return sum(counts)
    return tf.add_n([tf.cast(count, tf.int64) for count in counts])


def cond_in_all_replicas(
    condition: tf.Tensor, function: Callable[..., None], args: tuple[Any, ...] = ()
) -> None:
    """Call a function on all replicas if a condition holds; call it in replica context.

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
