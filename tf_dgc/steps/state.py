"""Memory: what one worker remembers between steps, in Keras variables."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

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


@dataclasses.dataclass(frozen=True)
class WorkerState:
    """What one worker remembers between steps of some tensors.

    Attributes:
        tensors: descriptions of the tensors that it is about.
        velocity: variable of each tensor; empty without momentum correction.
        residual: variable of each tensor, accumulated and not yet sent; empty if
            nothing is ever kept back.
        second_moment: variable of each tensor, of gradients that are divided by its
            root; empty if none are.
        largest_moment: variable of each tensor, of the largest second moment so far;
            empty unless gradients are divided by the root of that.
        states: variables of the method's own state by name, for each tensor.
        common: variables of its state by name that is of all tensors at once.
        counters: variable of what all tensors sent, equal on all workers.
        last_sent: record of when each entry was sent; None unless it is to be
            remembered.
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
        """Whether nothing of any tensor is remembered from step to step."""
        kept = (*self.velocity, *self.residual, *self.second_moment, *self.common)
        return not kept and not any(self.states)

    def of(self, indices: Sequence[int]) -> "WorkerState":
        """Return what is remembered of some of the tensors, in this order."""

        def pick(items: Sequence) -> list:
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
        """Return how long entries have waited here; 0 if none is kept back."""
        if self.last_sent is None:
            return Staleness(0.0, 0.0, 0.0)
        return self.last_sent.read(self.residual)

    # --- within a step, in replica context ------------------------------------------

    def read(self, with_residual: bool) -> list[dict[str, tf.Tensor]]:
        """Return each tensor's state by name, and if wanted as "residual" that one."""
        states = [
            {name: variable.local() for name, variable in state.items()}
            for state in self.states
        ]
        if not with_residual:
            return states
        kept = [r.local() for r in self.residual]
        kept = kept or [tf.zeros(t.shape, t.dtype) for t in self.tensors]
        return [{**s, "residual": r} for s, r in zip(states, kept, strict=True)]

    def read_common(self) -> dict[str, tf.Tensor]:
        """Return by name the state that is of all tensors at once."""
        return {name: variable.local() for name, variable in self.common.items()}

    def store_residual(self, values: Sequence[tf.Tensor]) -> None:
        """Assign values of any shape, if there is a residual."""
        assign_all(self.residual, values)

    def store_velocity(self, values: Sequence[tf.Tensor]) -> None:
        """Assign values of any shape, if there is a velocity."""
        assign_all(self.velocity, values)

    def store_states(self, new: Sequence[dict[str, tf.Tensor]]) -> None:
        """Assign the new values of each tensor's state, by name."""
        for state, values in zip(self.states, new, strict=True):
            _assign(state, values)

    def store_common(self, new: dict[str, tf.Tensor]) -> None:
        """Assign by name the new values of the state that is of all tensors."""
        _assign(self.common, new)

    def warn_of(self, finite: tf.Tensor, iteration: tf.Tensor) -> None:
        """Say once that this worker's gradient was left out, if it was not finite."""
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
    """Create all variables, at zero; call it on every worker, in the strategy's scope.

    Args:
        tensors: descriptions of all tensors of the optimizer.
        compressor: method, with a state of its own for tensors that are not exempt.
        keeps_residual: whether what is not sent is kept.
        keeps_velocity: whether momentum is accumulated locally.
        keeps_second_moment: whether gradients are divided by its root before.
        keeps_largest_moment: whether it is the root of the largest so far.
        tracks_staleness: whether to remember when entries were sent, where something
            is kept back.
        moment_rule: rule of the moments for another number of workers, one of
            `elastic.RULES`.

    Raises:
        ValueError: for a method that sees all tensors as one, if that is too large.
    """
    flat_views(tensors, compressor.together)  # raises before memory is taken
    counters = metrics.create_counters()
    residual = _accumulators(tensors, "residual") if keeps_residual else []
    last_sent = LastSent(tensors) if keeps_residual and tracks_staleness else None
    velocity = _accumulators(tensors, "velocity") if keeps_velocity else []

    def moments(name: str, kept: bool) -> list[PerWorkerVariable]:
        return _accumulators(tensors, name, moment_rule) if kept else []

    states = [
        {}
        if t.uncompressed
        else _make_state(compressor.state(t.shape), t.dtype, _stem(t), seed=i)
        for i, t in enumerate(tensors)
    ]
    return WorkerState(
        tensors,
        velocity,
        residual,
        moments("second_moment", keeps_second_moment),
        moments("largest_moment", keeps_largest_moment),
        states,
        _make_common(compressor, tensors),
        counters,
        last_sent,
    )


def _accumulators(
    tensors: Sequence[TensorSpec], name: str, rule: str = "sum"
) -> list[PerWorkerVariable]:
    return [
        PerWorkerVariable(t.shape, t.dtype.name, f"{_stem(t)}_{name}", rule)
        for t in tensors
    ]


def _assign(state: MethodState, values: dict[str, tf.Tensor]) -> None:
    for name, value in values.items():
        state[name].assign(value)


def _make_common(compressor: Compressor, tensors: Sequence[TensorSpec]) -> MethodState:
    specs = compressor.common_state()
    found = {dtype_and_bound(t): t for t in tensors if not t.uncompressed}
    if not specs or not found:
        return {}
    if len(found) > 1:
        raise ValueError(
            f"{compressor!r} sees all tensors as one, so they must have one dtype. "
            "Exclude those of another one from compression. Received: tensors that "
            f"differ, {' and '.join(t.label for t in found.values())}"
        )
    (dtype, _), *_ = found
    return _make_state(specs, dtype, compressor.name, seed=0)


def _make_state(
    specs: dict[str, StateSpec], dtype: tf.DType, stem: str, seed: int
) -> MethodState:
    """Create the variables of a method's state; `seed` is for initial values."""
    state: MethodState = {}
    for key, spec in specs.items():
        path = f"{stem}_{key}"
        _check_spec(key, spec)
        if spec.per_worker:
            state[key] = PerWorkerVariable(spec.shape, dtype.name, path, spec.elastic)
        else:
            state[key] = SharedVariable(initial_value(spec, seed), dtype.name, path)
    return state


def _check_spec(key: str, spec: StateSpec) -> None:
    if spec.per_worker and spec.initial is not None:
        raise ValueError(
            "State that differs between workers is zero at first, as another "
            "number of workers may go on with it. Pass `per_worker=False`, or no "
            f"`initial`. Received: {key}={spec}"
        )
    if spec.elastic not in worker_variables.RESTORE_RULES:
        raise ValueError(
            f"`elastic` must be one of {', '.join(worker_variables.RESTORE_RULES)}. "
            f"Received: {key}={spec}"
        )


def initial_value(spec: StateSpec, seed: int) -> np.ndarray:
    """Return a state's value before the first step."""
    if spec.initial is None:
        return np.zeros(spec.shape)
    return np.asarray(spec.initial(np.random.default_rng(seed)))


def _stem(tensor: TensorSpec) -> str:
    return tensor.label.replace("/", "_")


def assign_all(variables: Sequence[Any] | None, values: Sequence[tf.Tensor]) -> None:
    """Assign values of any shape to variables, if there are any."""
    if variables:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(tf.reshape(value, variable.shape))
