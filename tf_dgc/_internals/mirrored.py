"""Private names of strategies: their reduction, and how they create variables."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_lib,
    distribute_utils,
    mirrored_run,
    values,
)
from tensorflow.python.ops import control_flow_v2_func_graphs

from tf_dgc._internals.launching import CollectiveAllReduce


def get_cross_device_ops(strategy: tf.distribute.Strategy) -> Any:
    """Return the strategy's reduction (`StrategyExtended._cross_device_ops`)."""
    return strategy.extended._cross_device_ops


def set_cross_device_ops(strategy: tf.distribute.Strategy, ops: Any) -> None:
    """Replace the reduction of this strategy instance."""
    strategy.extended._cross_device_ops = ops


def is_default(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether it is no strategy at all, or TensorFlow's placeholder for none."""
    return strategy is None or isinstance(
        strategy,
        distribute_lib._DefaultDistributionStrategy
        | distribute_lib._DefaultDistributionStrategyV1,
    )


def collective_ops_of(strategy: tf.distribute.Strategy) -> Any | None:
    """Return the strategy's `CollectiveAllReduce`, or None if it has none.

    `MirroredExtended._collective_ops` exists beside a reduction the user chose.
    """
    for ops in (
        get_cross_device_ops(strategy),
        getattr(strategy.extended, "_collective_ops", None),
    ):
        if isinstance(ops, CollectiveAllReduce):
            return ops
    return None


def wrap_variable_creation(
    strategy: tf.distribute.Strategy, wrap: Callable[[Callable], Callable]
) -> None:
    """Wrap how this strategy instance creates variables (`_create_variable`)."""
    extended = strategy.extended
    extended._create_variable = wrap(extended._create_variable)


def check_updates(
    strategy: tf.distribute.Strategy, refuse: Callable[[tf.Variable], None]
) -> None:
    """Call `refuse` with a variable of another scope that an optimizer updates.

    TensorFlow only asserts that it is a `DistributedVariable` (`extended.update`).

    Args:
        strategy: strategy whose instance is changed.
        refuse: function of the variable that raises an error.
    """
    stock = strategy.extended.update

    def update(var: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(var, tf.Variable) and not isinstance(
            var, values.DistributedVariable
        ):
            refuse(var)
        return stock(var, *args, **kwargs)

    strategy.extended.update = update


def allow_conditions(strategy: tf.distribute.Strategy) -> None:
    """Let Keras's stock optimizers reduce and update within conditions.

    Of gradient accumulation and `ema_overwrite_frequency` Keras makes a condition of
    each replica. Within it TensorFlow calls `merge_call`, for which replicas cannot
    meet there, and raises. It has another implementation (`_use_merge_call`), in which
    each replica launches its own collectives and updates its own copies.

    Args:
        strategy: strategy whose instance is changed.
    """
    extended = strategy.extended
    stock_merges, stock_ops = extended._use_merge_call, extended._get_cross_device_ops
    stock_reduce = extended._replica_ctx_all_reduce

    def use_merge_call() -> bool:
        return stock_merges() and not _is_in_condition()

    def get_cross_device_ops(value: Any) -> Any:
        return collective_ops_of(strategy) if _is_in_condition() else stock_ops(value)

    def all_reduce(reduce_op: Any, value: Any, options: Any = None) -> Any:
        alone = strategy.num_replicas_in_sync == 1 and _is_in_condition()
        return value if alone else stock_reduce(reduce_op, value, options)

    extended._replica_ctx_all_reduce = all_reduce
    extended._use_merge_call = use_merge_call
    extended._get_cross_device_ops = get_cross_device_ops


def _is_in_condition() -> bool:
    """Whether a replica that is traced builds a branch of a condition of its own."""
    thread, graph = threading.current_thread(), tf.compat.v1.get_default_graph()
    if not isinstance(thread, mirrored_run._MirroredReplicaThread) or thread.in_eager:
        return False
    inner = graph
    while inner is not thread.graph:
        if not isinstance(inner, control_flow_v2_func_graphs.CondBranchFuncGraph):
            return False
        inner = inner.outer_graph
    return graph is not thread.graph


def per_replica(values: Sequence[Any]) -> Any:
    """Wrap one value per local replica (`distribute_utils.regroup`)."""
    return distribute_utils.regroup(tuple(values))
