"""Private names of strategies: their reduction, and how they create variables."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, distribute_utils

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


def per_replica(values: Sequence[Any]) -> Any:
    """Wrap one value per local replica (`distribute_utils.regroup`)."""
    return distribute_utils.regroup(tuple(values))
