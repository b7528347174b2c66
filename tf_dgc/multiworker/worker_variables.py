"""Optimizer variables that differ between workers."""

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc._internals import save_hooks, tracing
from tf_dgc.multiworker import consensus, cross_device

RESTORE_RULES = ("sum", "mean", "largest", "zero")


def restored_share(
    values: np.ndarray, worker: int, num_workers: int, rule: str
) -> np.ndarray:
    """Return one worker's share of the values that all workers saved, `[N, ...]`."""
    # With the same number of workers, each gets its own value back, bit for bit.
    # Otherwise all get the same: "sum", the total divided by the number of workers, for
    # values that add up over workers; "mean"; "largest", entry by entry, for values
    # that only grow or fade; "zero", for values that only the same worker can use.
    if len(values) == num_workers:
        return values[worker]
    if rule == "zero":
        return np.zeros_like(values[0])
    if rule == "largest":
        return values.max(axis=0)
    total = values.sum(axis=0, dtype=np.float64)
    divisor = num_workers if rule == "sum" else len(values)
    return np.asarray(total / divisor, values.dtype)


class ReplicaCopies:
    """The replicas' copies of a variable, or one value per local replica, `instead`."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        variable: Any,
        instead: Sequence[tf.Tensor] | None = None,
    ):
        self._strategy = strategy
        self._variable = variable
        self._instead = instead

    @property
    def local(self) -> tuple[tf.Variable, ...]:
        """The copies of this process, one per local replica."""
        return self._strategy.experimental_local_results(self._variable)

    def gather(self, local: bool = False) -> np.ndarray:
        """Return the values of all replicas, `[num_workers, ...]`; call it on all."""
        pairs = zip(self._pairs(), self._instead or self.local, strict=True)
        values = {replica: value.numpy() for (replica, _), value in pairs}
        if local or len(values) == self._strategy.num_replicas_in_sync:
            return np.stack([values[replica] for replica in sorted(values)])
        return self.gather_from_peers(values)

    def gather_from_peers(self, values: dict[int, np.ndarray]) -> np.ndarray:
        """Return the values of all replicas, given the local ones, by a collective."""
        rows = self._gather_words([_to_words(r, v) for r, v in values.items()])
        rows = rows[np.argsort(rows[:, 0])]
        like = next(iter(values.values()))
        content = np.ascontiguousarray(rows[:, 1:]).view(np.uint8)[:, : like.nbytes]
        values_of_all = np.ascontiguousarray(content).view(like.dtype)
        return values_of_all.reshape(len(rows), *like.shape)

    def scatter(self, values: np.ndarray, rule: str) -> None:
        """Restore the values that `gather` returned, `[N, ...]`, on any workers."""
        number = self._strategy.num_replicas_in_sync
        for replica, copy in self._pairs():
            copy.assign(restored_share(values, replica, number, rule))

    def _pairs(self) -> list[tuple[int, tf.Variable]]:
        ids = self._strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        replicas = map(int, self._strategy.experimental_local_results(ids))
        return list(zip(replicas, self.local, strict=True))

    def _gather_words(self, words: list[np.ndarray]) -> np.ndarray:
        """Return rows of int32 of all replicas, in any order."""
        hook = cross_device.cross_device_ops(self._strategy)
        first, *_ = hook.all_gather(list(map(tf.constant, words)))
        return first.numpy().reshape(self._strategy.num_replicas_in_sync, -1)


def _to_words(replica: int, value: np.ndarray) -> np.ndarray:
    """Return a replica's index and the bits of its value, zero-padded, as int32."""
    content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    words = np.zeros(1 + -(-len(content) // 4), np.int32)
    words[0] = replica
    words[1:].view(np.uint8)[: len(content)] = content
    return words


class PerWorkerVariable(keras.Variable):
    """A variable with a value of its own on every worker, zero at first."""

    # Inside a training step it is the local value. Outside, reading it (`numpy`)
    # returns the sum over all workers, and assigning divides a value among them.
    # Reading and saving are collectives, in which every worker takes part. A
    # SavedModel, from which no training continues, has this process's first value,
    # without a collective.

    def __init__(self, shape: Any, dtype: str, name: str, rule: str = "sum"):
        self._strategy = tf.distribute.get_strategy()
        self._rule = rule
        self._in_saved_model = False
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
        """Return entries of this replica's value, `[k]`, at indices `[k, rank]`."""
        # Within a training step. Reading the whole value would make the next update
        # copy it.
        if tracing.in_xla_context():  # does not copy, and lacks the operation below
            return tf.gather_nd(self.local(), indices)
        return tf.raw_ops.ResourceGatherNd(
            resource=self.value.handle, indices=indices, dtype=self.dtype
        )

    @property
    def value(self) -> Any:
        """The `tf.Variable`; outside a step, all workers must read it together."""
        self._meet()
        return super().value

    def numpy(self) -> Any:
        """Return the sum over all workers; call it on every worker."""
        return super().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        del copy  # it is always a new array
        return np.asarray(self.numpy(), dtype)

    def __repr__(self) -> str:
        # The base class prints the value, whose reading is a collective.
        return (
            f"<PerWorkerVariable path={self.path}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}>"
        )

    def local_values(self) -> list[np.ndarray]:
        """Return the value of every local replica, without a collective."""
        return [copy.numpy() for copy in self._copies.local]

    def gather(self, local: bool = False) -> np.ndarray:
        """Return the values of all workers, `[N, ...]`; a collective unless `local`."""
        if not local:
            self._meet()
        return self._copies.gather(local)

    def scatter(self, values: np.ndarray) -> None:
        """Restore gathered values `[N, ...]`, N the number of workers then."""
        shape = tuple(self.shape)
        if np.ndim(values) == 0 or np.shape(values)[1:] != shape:
            raise ValueError(
                f"The saved values of {self.path!r} must be of the shape "
                f"(number of workers, {', '.join(map(str, shape))}). Load with the "
                "model and the compression method they were saved with. "
                f"Received: shape={np.shape(values)}"
            )
        self._copies.scatter(values, self._rule)

    # tf.train.Checkpoint

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        # TensorFlow calls this of every object before it serializes any.
        self._in_saved_model = save_type == "savedmodel"
        return super()._trackable_children(save_type, **kwargs)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        if self._in_saved_model:
            # Its reader expects one variable under the variable's own name.
            return self._copies.local[0]._serialize_to_tensors()
        device = self._copies.local[0].device
        return {_SAVED: save_hooks.read_when_saved(self.gather, self.dtype, device)}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        values = restored_tensors[_SAVED].numpy()
        consensus.require_equal(
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
    def _copies(self) -> ReplicaCopies:
        return ReplicaCopies(self._strategy, super().value)

    def _meet(self) -> None:
        if tf.executing_eagerly() and not self._in_replica():
            consensus.wait_for_workers(
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
    """A variable that every worker computes and assigns locally, equal on all."""

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
