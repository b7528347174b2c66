"""Optimizer variables that differ between workers."""

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import checkpoints, stores, tracing
from tf_dgc.cluster import meeting
from tf_dgc.distribute.copies import Copies


class PerWorkerVariable(keras.Variable):
    """A variable with a value of its own on every worker, zero at first.

    Inside a training step it is the local value. Outside, reading it (`numpy`) gives
    the sum over all workers, and assigning divides among them. What is saved is the
    value of every worker, so that as many workers go on bit for bit where they were;
    another number of workers divides it (`elastic.share`). Reading and saving are
    collectives, which every worker has to take part in. A SavedModel, with which nobody
    goes on, has this process's first value, for which nobody is asked.

    Args:
        shape: shape of the value on one worker.
        dtype: name of a dtype, float32 or float64.
        name: name of the variable, without slashes.
        rule: name of the rule for another number of workers, one of `elastic.RULES`.
    """

    def __init__(self, shape: Any, dtype: str, name: str, rule: str = "sum"):
        self._strategy = tf.distribute.get_strategy()
        self._rule = rule
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

    def local_at(self, indices: tf.Tensor) -> tf.Tensor:
        """Return entries of this replica's value, `[k]`; call it as `local`.

        Of a value that was read as a whole, what updates it has to make a copy.

        Args:
            indices: index of each entry, int32 `[k, rank]`.
        """
        if tracing.in_xla_context():  # copies nothing, and has no such operation
            return tf.gather_nd(self.local(), indices)
        return tf.raw_ops.ResourceGatherNd(
            resource=self.value.handle, indices=indices, dtype=self.dtype
        )

    @property
    def value(self) -> Any:
        """The `tf.Variable`; outside a step, for every worker to read together."""
        self._meet()
        return super().value

    def numpy(self) -> Any:
        """Return the sum over all workers; call it on every worker."""
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

    def local_values(self) -> list[np.ndarray]:
        """Return the value of every replica of this process; it is not collective."""
        return [copy.numpy() for copy in self._copies.local]

    def gather(self, local: bool = False) -> np.ndarray:
        """Return the values of all workers, `[num_workers, ...]`; call it on all.

        Args:
            local: whether to return those of this process only, and contact nobody.
        """
        if not local:
            self._meet()
        return self._copies.gather(local)

    def scatter(self, values: np.ndarray) -> None:
        """Restore what `gather` returned, here or on another number of workers.

        Args:
            values: values of all workers, `[N, ...]`, N the number of workers then.

        Raises:
            ValueError: if it is of another shape, as of another model or method.
        """
        shape = tuple(self.shape)
        if np.ndim(values) == 0 or np.shape(values)[1:] != shape:
            raise ValueError(
                f"The saved values of {self.path!r} must be of the shape "
                f"(number of workers, {', '.join(map(str, shape))}). Load with the "
                "model and the compression method they were saved with. "
                f"Received: shape={np.shape(values)}"
            )
        self._copies.scatter(values, self._rule)

    # --- how tf.train.Checkpoint saves and restores ---------------------------------

    def _serialize_to_tensors(self) -> dict[str, Any]:
        if checkpoints.is_saving_saved_model():
            # Whoever loads that has one variable, and wants its value by its name.
            return self._copies.local[0]._serialize_to_tensors()
        device = self._copies.local[0].device
        read = stores.read_when_saved(self.gather, self.dtype, device)
        return {_SAVED: read}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        values = restored_tensors[_SAVED].numpy()
        meeting.agree(
            self._strategy,
            lambda: {self.path: zlib.crc32(values.data)},
            SAME_CHECKPOINT,
        )
        self.scatter(values)
        return super().value

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        raise ValueError(
            "State that differs between workers cannot be saved asynchronously, while "
            "the next step changes it. Pass no `tf.train.CheckpointOptions("
            "experimental_enable_async_checkpoint=True)`."
        )

    @property
    def _copies(self) -> Copies:
        return Copies(self._strategy, super().value)

    def _meet(self) -> None:
        if tf.executing_eagerly() and not self._in_replica():
            meeting.rendezvous(
                self._strategy, f"read the per-worker state {self.path!r}"
            )

    def _in_replica(self) -> bool:
        return (
            tf.distribute.get_strategy() is self._strategy
            and not tf.distribute.in_cross_replica_context()
        )


SAME_CHECKPOINT = (
    "All workers must restore, and from the same checkpoint or copies of it."
)
_SAVED = "VALUES_OF_ALL_WORKERS"


class SharedVariable(keras.Variable):
    """A variable that every worker computes alike, and assigns to itself.

    Reading and writing it is local. A checkpoint has the first worker's value.

    Args:
        initial_value: first value, a NumPy array, equal on all workers.
        dtype: name of a float dtype.
        name: name of the variable, without slashes.
    """

    def __init__(self, initial_value: np.ndarray, dtype: str, name: str):
        super().__init__(
            initial_value,
            dtype=dtype,
            trainable=False,
            aggregation="only_first_replica",
            synchronization="on_read",
            name=name,
        )

    def local(self) -> tf.Tensor:
        """Return this replica's value; call it inside a training step."""
        return tf.convert_to_tensor(self.value)
