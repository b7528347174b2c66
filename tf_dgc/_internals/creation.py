"""Private TensorFlow names that creating variables takes."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import device_util
from tensorflow.python.ops import collective_ops
from tensorflow.python.trackable import base

from tf_dgc._internals.launching import collective_key

Settle = Callable[[tf.Tensor, str], tf.Tensor]


class WorkerGroup:
    """Collectives, one after the other, of one processor of every worker.

    Call them eagerly, and on all workers.

    Args:
        strategy: a `MultiWorkerMirroredStrategy`, whose keys are used
            (`CollectiveKeys`).

    Attributes:
        size: number of workers.
        is_first: whether this worker is the one that sends (`_is_chief`).
    """

    def __init__(self, strategy: tf.distribute.MultiWorkerMirroredStrategy):
        extended = strategy.extended
        self._device = device_util.get_host_for_device(extended.worker_devices[0])
        self._group = extended._collective_keys.get_group_key([self._device])
        self.size: int = extended._num_workers
        self.is_first: bool = extended._is_chief

    def all_gather(self, words: tf.Tensor) -> tf.Tensor:
        """Return the words of all workers, `[size, w]` of int32 `[w]`."""
        with tf.device(self._device):
            key = collective_key("creation", words)
            rows = collective_ops.all_gather_v2(words, self.size, self._group, key)
            return tf.reshape(rows, [self.size, -1])

    def broadcast(self, words: tf.Tensor) -> tf.Tensor:
        """Return the first worker's words; those of others have the same shape."""
        with tf.device(self._device):
            key = collective_key("broadcast", words)
            if not self.is_first:
                return collective_ops.broadcast_recv_v2(
                    words.shape, words.dtype, self.size, self._group, key
                )
            return collective_ops.broadcast_send_v2(words, self.size, self._group, key)


def replace_initial_values(
    strategy: tf.distribute.MultiWorkerMirroredStrategy,
    settle: Settle,
    stock_broadcast: Callable[[Callable[[], tf.Tensor]], tf.Tensor],
) -> None:
    """Let a function decide what variables of this strategy instance start with.

    In place of a broadcast from the first worker
    (`CollectiveAllReduceExtended._get_variable_creator_initial_value`).

    Args:
        strategy: instance of several workers, changed in place.
        settle: function of what this worker would start with, a tensor, and the
            variable's name; returns the value to start with.
        stock_broadcast: function that calls the broadcast, where a graph creates the
            variable or it does not hold numbers.
    """
    stock = strategy.extended._get_variable_creator_initial_value

    def creator(replica_id: int, device: Any, primary_var: Any, **kwargs: Any) -> Any:
        stock_value = stock(replica_id, device, primary_var, **kwargs)
        if replica_id > 0:  # it copies the first replica's
            return stock_value

        def initial_value() -> tf.Tensor:
            if not tf.executing_eagerly():
                return stock_broadcast(stock_value)
            with tf.device(device):
                value = _value(kwargs["initial_value"], kwargs.get("dtype"))
            if not _is_numeric(value.dtype):
                return stock_broadcast(stock_value)
            return settle(value, kwargs.get("name") or "without a name")

        return initial_value

    strategy.extended._get_variable_creator_initial_value = creator


def _is_numeric(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool


def _value(initial: Any, dtype: Any) -> tf.Tensor:
    """Return an initial value, which may be a function or come from a checkpoint."""
    if callable(initial):
        initial = initial()
    if isinstance(initial, base.CheckpointInitialValue):
        initial = initial.wrapped_value
    return tf.convert_to_tensor(initial, dtype)
