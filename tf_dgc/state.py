"""State: optimizer variables that differ between workers."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import cluster


class PerWorkerVariable(keras.Variable):
    """A variable with a value of its own on every worker, zero at first.

    Inside a training step it is the local value. Outside (`numpy`, saving) it is the
    sum over all workers, and assigning divides among them: a checkpoint of N workers
    restores to M workers with the same total of what was not yet sent. Reading is
    therefore a collective, which every worker has to take part in.

    Args:
        shape: of the value on one worker.
        dtype: a float type.
        name: of the variable.
    """

    def __init__(self, shape: Any, dtype: str, name: str):
        self._strategy = tf.distribute.get_strategy()
        super().__init__(
            initializer="zeros",
            shape=shape,
            dtype=dtype,
            trainable=False,
            aggregation="sum",
            synchronization="on_read",
            name=name,
        )

    def local(self) -> tf.Tensor:
        """Return this replica's value; call it inside a training step."""
        return tf.convert_to_tensor(self.value)

    def numpy(self) -> Any:
        """Return the sum over all workers; call it on every worker."""
        self._meet()
        return super().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        del copy  # it is a new array in any case
        return np.asarray(self.numpy(), dtype)

    def __repr__(self) -> str:
        # The base class prints the value, and reading it is a collective.
        return (
            f"<PerWorkerVariable path={self.path}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}>"
        )

    def _serialize_to_tensors(self) -> Any:
        # Called by tf.train.Checkpoint for every save.
        self._meet()
        return super()._serialize_to_tensors()

    def _meet(self) -> None:
        if tf.executing_eagerly() and not self._in_replica():
            cluster.rendezvous(
                self._strategy, f"read the per-worker state {self.path!r}"
            )

    def _in_replica(self) -> bool:
        return (
            tf.distribute.get_strategy() is self._strategy
            and not tf.distribute.in_cross_replica_context()
        )
