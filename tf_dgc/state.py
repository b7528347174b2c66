"""State: optimizer variables that differ between workers."""

from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import cluster
from tf_dgc.compressors.base import StateSpec


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


class SharedVariable(keras.Variable):
    """A variable that every worker computes alike, and assigns to itself.

    Reading and writing it is local. A checkpoint has the first worker's value.

    Args:
        initial_value: a NumPy array, equal on all workers.
        dtype: a float type.
        name: of the variable.
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


State: TypeAlias = dict[str, PerWorkerVariable | SharedVariable]


def make_state(specs: dict[str, StateSpec], dtype: str, name: str, seed: int) -> State:
    """Create the variables of a method's state for one tensor.

    Args:
        specs: by name.
        dtype: of all of them.
        name: of the model variable.
        seed: for initial values; equal on all workers.
    """
    state: State = {}
    for key, spec in specs.items():
        path = f"{name}_{key}"
        if spec.per_worker and spec.initial is not None:
            raise ValueError(
                "State that differs between workers is zero at first, as it is saved "
                "as the sum over workers. Pass `per_worker=False`, or no `initial`. "
                f"Received: {key}={spec}"
            )
        if spec.per_worker:
            state[key] = PerWorkerVariable(spec.shape, dtype, path)
        else:
            state[key] = SharedVariable(initial_value(spec, seed), dtype, path)
    return state


def initial_value(spec: StateSpec, seed: int) -> np.ndarray:
    """Return a state's value before the first step."""
    if spec.initial is None:
        return np.zeros(spec.shape)
    return np.asarray(spec.initial(np.random.default_rng(seed)))
