"""Builds a step's inputs: clips the gradients, scales them by the learning rate."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import clipping, schedules
from tf_dgc.clipping import Scale
from tf_dgc.compressors import Compressor
from tf_dgc.optimizers.state import StepSettings
from tf_dgc.smart_cond import BoolOrTensor
from tf_dgc.steps import native, tensorflow_ops
from tf_dgc.steps.accumulation import Gradient, gradient_values, to_rows
from tf_dgc.steps.base import StepInputs
from tf_dgc.steps.state import WorkerState

# From this sparsity on, masking takes less than a tenth of an entry's momentum.
MASKED_FROM_SPARSITY = 0.99


def clip_gradients(
    settings: StepSettings,
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
    num_workers: int,
    loss_scale: float | None,
) -> tuple[list[Gradient], list[Scale]]:
    """Return the gradients, sparse ones with distinct rows, and a factor for each.

    With error feedback the thresholds are `N**-0.5` times the inner optimizer's (Lin et
    al., section 3.2); without it clipping is Keras's own.

    Args:
        settings: the optimizer's settings.
        grads: one gradient per variable, none missing.
        variables: the model's variables.
        num_workers: number of workers, N.
        loss_scale: factor of the loss, which the gradients are divided by; or None.
    """
    gradients = [to_rows(g, v) for g, v in zip(grads, variables, strict=True)]
    values, scales = clipping.clip_gradients(
        [gradient_values(g) for g in gradients],
        num_workers if settings.error_feedback else 1,
        loss_scale=loss_scale,
        **settings.hyperparameters.clipping,
    )
    pairs = zip(gradients, values, strict=True)
    return [_with_values(gradient, v) for gradient, v in pairs], scales


def _with_values(gradient: Gradient, values: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices)
    return values


def create_inputs(
    settings: StepSettings,
    gradients: Sequence[Gradient],
    scales: Sequence[Scale],
    indices: Sequence[int],
    worker_state: WorkerState,
    *,
    compressor: Compressor,
    iteration: tf.Tensor,
    worker: int | tf.Tensor,
    num_workers: int,
    **exchange: Any,
) -> StepInputs:
    """Return the inputs of one worker's step.

    Args:
        settings: the optimizer's settings.
        gradients: clipped gradients, see `clip_gradients`.
        scales: factor of each.
        indices: index of each among the tensors of `worker_state`.
        worker_state: this worker's state of all tensors.
        compressor: method of the step.
        iteration: number of the step, a scalar integer tensor.
        worker: index of this worker.
        num_workers: number of workers, N.
        **exchange: further fields of `StepInputs`, about the exchange.
    """
    selected = worker_state.of(indices)
    return StepInputs(
        compressor=compressor,
        tensors=selected.tensors,
        indices=indices,
        gradients=gradients,
        scales=scales,
        worker_state=selected,
        momentum=settings.hyperparameters.momentum,
        nesterov=settings.hyperparameters.nesterov,
        factor_masking=_factor_masking(settings, compressor, iteration),
        seed=settings.seed,
        iteration=iteration,
        worker=worker,
        num_workers=num_workers,
        sizes=[t.size for t in worker_state.tensors],
        **exchange,
    )


def _factor_masking(
    settings: StepSettings, compressor: Compressor, iteration: tf.Tensor
) -> BoolOrTensor:
    """Return whether this step clears the velocity of the entries it sends."""
    if settings.factor_masking is not None:
        return settings.factor_masking
    if settings.hyperparameters.adam:
        return False
    # Methods that send entries above a threshold have no sparsity; they are masked.
    sparsity = getattr(compressor, "sparsity", MASKED_FROM_SPARSITY)
    return schedules.sparsity_at(sparsity, iteration) >= MASKED_FROM_SPARSITY


def scale_by_learning_rate(inputs: StepInputs, learning_rate: Any) -> StepInputs:
    """Return the inputs of a step whose gradients are multiplied by the learning rate.

    The scales become tensors, which are zero or NaN if a gradient is not finite: so
    that is checked here, once.

    Args:
        inputs: the step's inputs.
        learning_rate: learning rate of the step, a scalar.
    """
    values = [gradient_values(g) for g in inputs.gradients]
    residual = inputs.worker_state.residual
    path = native if native.is_available(residual) else tensorflow_ops
    scales = path.scales_or_nan(values, inputs.scales, residual)
    scales *= tf.cast(learning_rate, tf.float64)
    if all(scale is inputs.scales[0] for scale in inputs.scales):
        return inputs._replace(scales=[scales[0]] * len(inputs.scales))
    return inputs._replace(scales=tf.unstack(scales))
