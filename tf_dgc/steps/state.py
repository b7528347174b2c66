"""The Keras variables that one worker keeps between steps."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_dgc import metrics
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.compressors.base import Compressor, StateSpec
from tf_dgc.multiworker import worker_variables
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.steps.base import MethodState, WorkerState
from tf_dgc.steps.flat_buffer import dtype_and_bound, flat_views
from tf_dgc.steps.staleness import LastSent


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

    Another number of workers restores the moments by `moment_rule`, one of
    `worker_variables.RESTORE_RULES`.
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


def _stem(tensor: TensorSpec) -> str:
    return tensor.label.replace("/", "_")
