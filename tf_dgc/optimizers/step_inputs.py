"""What goes into a step, of what Keras hands to `apply`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc import clipping, schedules
from tf_dgc._internals import keras_optimizers, tracing
from tf_dgc.clipping import Scale
from tf_dgc.compressors import Compressor
from tf_dgc.optimizers import validation
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters
from tf_dgc.optimizers.state import OptimizerState
from tf_dgc.smart_cond import BoolOrTensor
from tf_dgc.steps import native, tensorflow_ops
from tf_dgc.steps.accumulation import Gradient, gradient_values, to_rows
from tf_dgc.steps.base import StepInputs
from tf_dgc.steps.plan import split_uncompressed
from tf_dgc.steps.state import WorkerState

# --- Weigh: multiply gradients by a learning rate before they wait.


def scale_by_learning_rate(inputs: StepInputs, rate: Any) -> StepInputs:
    """Return what goes into a step whose gradients are multiplied by a rate.

    Whether they are finite is looked at here: a scale that is a tensor says so.

    Args:
        inputs: inputs of the step.
        rate: learning rate of the step, a scalar.
    """
    values, given = list(map(gradient_values, inputs.gradients)), inputs.scales
    kept = inputs.worker_state.residual
    path = native if native.is_available(kept) else tensorflow_ops
    scales = path.zero_scales_if_nonfinite(values, given, kept) * tf.cast(
        rate, tf.float64
    )
    if all(s is given[0] for s in given):
        return inputs._replace(scales=[scales[0]] * len(given))
    return inputs._replace(scales=tf.unstack(scales))


# Sparsity from which on masking takes less than a tenth of an entry's momentum.
MASKED_FROM_SPARSITY = 0.99


def clip_local_gradients(
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
    num_workers: int,
    loss_scale: float | None,
    thresholds: dict[str, float | None],
) -> tuple[list[Gradient], list[Scale]]:
    """Return gradients, sparse ones row by row, and what each is to be multiplied by.

    Args:
        grads: gradients of the variables.
        variables: variables of the model.
        num_workers: N of local gradient clipping; 1 for Keras's own, whatever N is.
        loss_scale: factor that the loss was multiplied by.
        thresholds: thresholds of the inner optimizer, by Keras's names.
    """
    given = [to_rows(g, v) for g, v in zip(grads, variables, strict=True)]
    values = [gradient_values(g) for g in given]
    clipped, scales = clipping.clip_gradients(
        values, num_workers, loss_scale=loss_scale, **thresholds
    )
    pairs = zip(given, clipped, strict=True)
    return [_with_entries(g, values) for g, values in pairs], scales


class StepContext(NamedTuple):
    """Where a step runs, and by which method.

    Attributes:
        compressor: method of all tensors that are not exempt.
        worker: index of this worker, an int or a scalar integer tensor.
        num_workers: number of workers that the step is planned for.
        loss_scale: factor that the loss was multiplied by, or None; a gradient is
            divided by it.
        settings: fields of `Inputs` by name that differ from their defaults.
    """

    compressor: Compressor
    worker: int | tf.Tensor
    num_workers: int
    loss_scale: float | None
    settings: dict[str, Any]


def create_inputs(
    optimizer: Any,
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
    hyperparameters: InnerHyperparameters,
    worker_state: WorkerState,
    place: StepContext,
) -> StepInputs:
    """Return what goes into the step of one worker.

    Args:
        optimizer: optimizer whose step it is.
        grads: gradients of the variables.
        variables: variables of the model.
        hyperparameters: settings of the inner optimizer that are applied in its place.
        worker_state: variables of what this worker remembers, of all variables.
        place: place that the step runs at.
    """
    indices = [keras_optimizers.variable_index(optimizer, v) for v in variables]
    clipped = clip_by_hyperparameters(
        optimizer, grads, variables, hyperparameters, place.loss_scale
    )
    return inputs_of_clipped(
        optimizer, clipped, indices, hyperparameters, worker_state, place
    )


def clip_by_hyperparameters(
    optimizer: Any,
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
    hyperparameters: InnerHyperparameters,
    loss_scale: float | None,
) -> tuple[list[Gradient], list[Scale]]:
    """Return what `clip` does, by the settings of an optimizer; arguments are as there.

    Where nothing is kept back, clipping is Keras's own, whatever the workers.
    """
    asks = optimizer.compressor, optimizer.error_feedback
    sharing = optimizer.num_workers if validation.uses_error_feedback(*asks) else 1
    return clip_local_gradients(
        grads, variables, sharing, loss_scale, hyperparameters.clipping
    )


def inputs_of_clipped(
    optimizer: Any,
    clipped: tuple[Sequence[Gradient], Sequence[Scale]],
    indices: Sequence[int],
    hyperparameters: InnerHyperparameters,
    worker_state: WorkerState,
    place: StepContext,
) -> StepInputs:
    """Return what `assemble` does, of gradients that `clip` returned.

    Args:
        optimizer: optimizer whose step it is.
        clipped: gradients, and what each is to be multiplied by.
        indices: index of each among the tensors of `worker_state`.
        hyperparameters: settings of the inner optimizer that are applied in its place.
        worker_state: variables of what this worker remembers.
        place: place that the step runs at.
    """
    given, scales = clipped
    own, step = worker_state.of(indices), optimizer.iterations.value
    return StepInputs(
        place.compressor,
        own.tensors,
        indices,
        given,
        scales,
        own,
        hyperparameters.momentum,
        hyperparameters.nesterov,
        _masks(optimizer.factor_masking, hyperparameters, place.compressor, step),
        optimizer.seed,
        step,
        place.worker,
        place.num_workers,
        [t.size for t in worker_state.tensors],
        **place.settings,
    )


def _masks(
    asked: bool | None,
    hyperparameters: InnerHyperparameters,
    compressor: Compressor,
    iteration: tf.Tensor,
) -> BoolOrTensor:
    """Return whether the velocity is cleared where entries are sent in this step."""
    if asked is not None:
        return asked
    if hyperparameters.adam:
        return False
    # Methods that send what has grown have no sparsity, and are masked.
    sparsity = getattr(compressor, "sparsity", MASKED_FROM_SPARSITY)
    return schedules.sparsity_at(sparsity, iteration) >= MASKED_FROM_SPARSITY


def collect_inputs(
    optimizer: Any,
    grads: list,
    variables: list,
    hyperparameters: InnerHyperparameters,
    kept: OptimizerState,
) -> StepInputs:
    """Return what goes into the step.

    Args:
        optimizer: `CompressedOptimizer` whose step it is.
        grads: gradients of the variables.
        variables: variables of the model.
        hyperparameters: settings of the inner optimizer that are applied in its place.
        kept: variables that the optimizer keeps.
    """
    place = StepContext(
        kept.chosen.compressor,
        tf.distribute.get_replica_context().replica_id_in_sync_group,
        optimizer.num_workers,
        optimizer.loss_scale_factor,
        {
            "drops_entries": optimizer.communicator.drops_entries,
            "all_workers_native": kept.use_native,
            "machine": optimizer.communicator.node_workers(),
        },
    )
    collected = create_inputs(
        optimizer, grads, variables, hyperparameters, kept.worker_state, place
    )
    if hyperparameters.scales_by_learning_rate:
        collected = scale_by_learning_rate(collected, optimizer.learning_rate)
    if kept.adam:
        return kept.adam.precondition(collected)
    return collected


class StepBucket(NamedTuple):
    """A part of a step, or all of it.

    Attributes:
        places: places of its variables among those of the step.
        inputs: inputs of it.
    """

    places: Sequence[int]
    inputs: StepInputs


def collect_buckets(
    optimizer: Any,
    grads: list,
    variables: list,
    hyperparameters: InnerHyperparameters,
    kept: OptimizerState,
) -> list[StepBucket]:
    """Return what goes into the parts of a step, one for each bucket that is in it.

    Arguments are those of `collect`. It is all in one part where the gradient is
    clipped by the norm of all, where a variable is passed several times, and within
    XLA, which exchanges nothing.
    """
    indices = [keras_optimizers.variable_index(optimizer, v) for v in variables]
    place_of = {index: place for place, index in enumerate(indices)}
    buckets = [
        [place_of[i] for i in bucket if i in place_of] for bucket in kept.chosen.buckets
    ]
    buckets = [bucket for bucket in buckets if bucket]
    whole = hyperparameters.clipping["global_clipnorm"] or tracing.in_xla_context()
    whole = whole or len(place_of) < len(variables)
    if whole or len(buckets) < 2:
        own = collect_inputs(optimizer, grads, variables, hyperparameters, kept)
        return [StepBucket(range(len(variables)), own)]
    tensors = [kept.tensors[i] for i in indices]
    apart = len(split_uncompressed(tensors, optimizer.num_workers)) > 1
    parts = []
    for some in buckets:
        picked = [grads[i] for i in some], [variables[i] for i in some]
        own = collect_inputs(optimizer, *picked, hyperparameters, kept)
        parts.append(StepBucket(some, own._replace(separate_uncompressed=apart)))
    return parts


def _with_entries(gradient: Gradient, values: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices)
    return values
