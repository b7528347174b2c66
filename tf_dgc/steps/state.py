"""The Keras variables that one worker keeps between steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import metrics
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors.base import Compressor, StateSpec
from tf_dgc.metrics import LastSent, Staleness
from tf_dgc.multiworker import worker_variables
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.steps.flat_buffer import dtype_and_bound, flat_views

MethodState: TypeAlias = dict[str, PerWorkerVariable | SharedVariable]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class WorkerState:
    """One worker's variables of some tensors.

    `read...`, `store...` and `warn_if_nonfinite` run within a step, in replica context.

    Attributes:
        tensors: descriptions of the tensors.
        velocity: velocity of each tensor; empty without momentum correction.
        residual: residual of each tensor; empty without error feedback.
        second_moment: second moment of each tensor's gradient; empty unless gradients
            are divided by its root (Adam).
        largest_moment: largest second moment so far of each tensor; empty unless
            gradients are divided by its root (AMSGrad).
        states: the method's state for each tensor, by name.
        common: the method's state that all tensors share, by name.
        counters: totals of what was sent, equal on all workers.
        last_sent: step in which each entry was last sent; None unless tracked.
    """

    tensors: Sequence[TensorSpec]
    velocity: Sequence[PerWorkerVariable]
    residual: Sequence[PerWorkerVariable]
    second_moment: Sequence[PerWorkerVariable]
    largest_moment: Sequence[PerWorkerVariable]
    states: Sequence[MethodState]
    common: MethodState
    counters: keras.Variable
    last_sent: LastSent | None

    @property
    def is_empty(self) -> bool:
        """Whether there are no variables of any tensor."""
        accumulators = (*self.velocity, *self.residual, *self.second_moment)
        return not (accumulators or self.common or any(self.states))

    def of(self, indices: Sequence[int]) -> "WorkerState":
        """Return the variables of some of the tensors, in this order."""

        def pick(items: Sequence[_T]) -> list[_T]:
            return [items[i] for i in indices] if items else []

        return dataclasses.replace(
            self,
            tensors=pick(self.tensors),
            velocity=pick(self.velocity),
            residual=pick(self.residual),
            second_moment=pick(self.second_moment),
            largest_moment=pick(self.largest_moment),
            states=pick(self.states),
        )

    def staleness(self) -> Staleness:
        """Return the staleness of this worker's entries; 0 if not tracked."""
        if self.last_sent is None:
            return Staleness(0.0, 0.0, 0.0)
        return self.last_sent.read(self.residual)

    def read(self, with_residual: bool) -> list[dict[str, tf.Tensor]]:
        """Return each tensor's state by name, optionally with "residual"."""
        states = [_read(state) for state in self.states]
        if not with_residual:
            return states
        if self.residual:
            residual = [r.local() for r in self.residual]
        else:
            residual = [tf.zeros(t.shape, t.dtype) for t in self.tensors]
        return [{**s, "residual": r} for s, r in zip(states, residual, strict=True)]

    def read_common(self) -> dict[str, tf.Tensor]:
        """Return the state that all tensors share, by name."""
        return _read(self.common)

    def store_residual(self, values: Sequence[tf.Tensor]) -> None:
        """Assign values of any shape, if there is a residual."""
        assign_all(self.residual, values)

    def store_velocity(self, values: Sequence[tf.Tensor]) -> None:
        """Assign values of any shape, if there is a velocity."""
        assign_all(self.velocity, values)

    def store_states(self, new: Sequence[dict[str, tf.Tensor]]) -> None:
        """Assign new values of each tensor's state, by name."""
        for state, values in zip(self.states, new, strict=True):
            _assign(state, values)

    def store_common(self, new: dict[str, tf.Tensor]) -> None:
        """Assign new values of the state that all tensors share, by name."""
        _assign(self.common, new)

    def warn_if_nonfinite(self, finite: tf.Tensor, iteration: tf.Tensor) -> None:
        """Warn once if this worker's gradient is not finite."""
        metrics.warn_once_if_nonfinite(self.counters, finite, iteration)


def create_worker_state(
    tensors: Sequence[TensorSpec],
    compressor: Compressor,
    *,
    keeps_residual: bool,
    keeps_velocity: bool,
    keeps_second_moment: bool,
    keeps_largest_moment: bool,
    tracks_staleness: bool,
    moment_rule: str = "mean",
) -> WorkerState:
    """Create all variables; call it on every worker, in the strategy's scope.

    Args:
        tensors: descriptions of all tensors of the optimizer.
        compressor: method of the compressed tensors.
        keeps_residual: whether unsent values accumulate (error feedback).
        keeps_velocity: whether momentum is corrected.
        keeps_second_moment: whether gradients are divided by its root.
        keeps_largest_moment: whether they are divided by the root of the largest one.
        tracks_staleness: whether to record when entries were sent, if there is a
            residual.
        moment_rule: rule by which another number of workers restores the moments, one
            of `worker_variables.RESTORE_RULES`.

    Raises:
        ValueError: if the method sends all tensors as one, and they are too large
            together or differ in dtype.
    """
    flat_views(tensors, compressor.entire_model)  # raises before memory is allocated

    def accumulators(name: str, create: bool, rule: str) -> list[PerWorkerVariable]:
        return [
            PerWorkerVariable(t.shape, t.dtype.name, f"{_stem(t)}_{name}", rule)
            for t in (tensors if create else [])
        ]

    return WorkerState(
        tensors=tensors,
        counters=metrics.create_counters(),
        residual=accumulators("residual", keeps_residual, "sum"),
        last_sent=LastSent(tensors) if keeps_residual and tracks_staleness else None,
        velocity=accumulators("velocity", keeps_velocity, "sum"),
        states=[
            {}
            if t.uncompressed
            else _create_state(compressor.state(t.shape), t.dtype, _stem(t), seed=i)
            for i, t in enumerate(tensors)
        ],
        second_moment=accumulators("second_moment", keeps_second_moment, moment_rule),
        largest_moment=accumulators(
            "largest_moment", keeps_largest_moment, moment_rule
        ),
        common=_create_common_state(compressor, tensors),
    )


def _create_common_state(
    compressor: Compressor, tensors: Sequence[TensorSpec]
) -> MethodState:
    specs = compressor.common_state()
    by_dtype = {dtype_and_bound(t): t for t in tensors if not t.uncompressed}
    if not specs or not by_dtype:
        return {}
    if len(by_dtype) > 1:
        raise ValueError(
            f"{compressor!r} sends all tensors as one, so they must have one dtype. "
            "Exclude those of another dtype from compression. Received: tensors that "
            f"differ, {' and '.join(t.label for t in by_dtype.values())}"
        )
    ((dtype, _),) = by_dtype
    return _create_state(specs, dtype, compressor.name, seed=0)


def _create_state(
    specs: dict[str, StateSpec], dtype: tf.DType, stem: str, seed: int
) -> MethodState:
    state: MethodState = {}
    for key, spec in specs.items():
        path = f"{stem}_{key}"
        _check_spec(key, spec)
        if spec.per_worker:
            state[key] = PerWorkerVariable(spec.shape, dtype.name, path, spec.rescaling)
        else:
            state[key] = SharedVariable(initial_value(spec, seed), dtype.name, path)
    return state


def _check_spec(key: str, spec: StateSpec) -> None:
    if spec.per_worker and spec.initial is not None:
        raise ValueError(
            "State that differs between workers must be zero at first, because another "
            "number of workers may restore it. Pass `per_worker=False`, or no "
            f"`initial`. Received: {key}={spec}"
        )
    if spec.rescaling not in worker_variables.RESTORE_RULES:
        raise ValueError(
            f"`rescaling` must be one of {', '.join(worker_variables.RESTORE_RULES)}. "
            f"Received: {key}={spec}"
        )


def initial_value(spec: StateSpec, seed: int) -> np.ndarray:
    """Return a state's value before the first step."""
    if spec.initial is None:
        return np.zeros(spec.shape)
    return np.asarray(spec.initial(np.random.default_rng(seed)))


def assign_all(variables: Sequence[Any] | None, values: Sequence[tf.Tensor]) -> None:
    """Assign values of any shape to variables, if there are any."""
    if variables:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(tf.reshape(value, variable.shape))


def _read(state: MethodState) -> dict[str, tf.Tensor]:
    return {name: variable.local() for name, variable in state.items()}


def _assign(state: MethodState, values: dict[str, tf.Tensor]) -> None:
    for name, value in values.items():
        state[name].assign(value)


def _stem(tensor: TensorSpec) -> str:
    return tensor.label.replace("/", "_")
