"""From the arguments of `apply` to the inputs of a step.

Pairs gradients with variables, compares workers, assigns variables that their gradient
overwrites, clips the gradients, and scales them by the learning rate.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import clipping, schedules
from tf_dgc._internals import keras_optimizers
from tf_dgc.clipping import Scale
from tf_dgc.codecs.bits import num_bytes, to_words
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import AllGather
from tf_dgc.compressors import Compressor
from tf_dgc.compressors.common.one_round import from_words
from tf_dgc.conditions import BoolOrTensor
from tf_dgc.multiworker.consensus import require_equal_while_tracing
from tf_dgc.optimizers.inner_hyperparameters import InnerHyperparameters
from tf_dgc.steps import accumulation, native, tensorflow_ops
from tf_dgc.steps.accumulation import Gradient, gradient_values, to_rows
from tf_dgc.steps.base import StepInputs, WorkerState

# --- Matching ------------------------------------------------------------------------


def match_gradients(
    optimizer: keras.optimizers.Optimizer, grads: Any, variables: Any
) -> tuple[list[Any], list[keras.Variable]]:
    """Pair gradients with variables; build the optimizer if it is not built.

    Args:
        optimizer: optimizer whose `apply` was called.
        grads: one gradient per variable: a tensor, `tf.IndexedSlices` or None.
        variables: variables in the same order; None for those of the first call.

    Returns:
        The gradients that are not None, and their variables; both empty if all
        gradients are None.

    Raises:
        ValueError: if numbers or shapes of gradients and variables differ, for
            variables that the optimizer was not built with, and without variables
            before it is built.
    """
    if len(grads) == 0:
        return [], []
    if variables is None:
        if not optimizer.built:
            raise ValueError(
                "Without variables, gradients are those of the variables that the "
                "optimizer is built for, and it is not yet built. Call "
                "`apply(grads, variables)`, or `optimizer.build(variables)` before. "
                f"Received: {len(grads)} gradients"
            )
        variables = keras_optimizers.trainable_variables(optimizer)
    variables = list(map(keras_optimizers.as_keras_variable, variables))
    _check_number(grads, variables)
    optimizer.build(variables)
    keras_optimizers.check_known(optimizer, variables)
    variables = keras_optimizers.known_variables(optimizer, variables)
    grads, variables = keras_optimizers.drop_missing_gradients(
        optimizer, grads, variables
    )
    _check_shapes(grads, variables)
    return grads, variables


def add_repeated(
    gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> tuple[list[Any], list[keras.Variable]]:
    """Sum the gradients of each variable that was passed several times.

    Variables that their gradient overwrites are not summed.

    Returns:
        Gradients, and their variables, each once.
    """
    places: dict[Any, list[int]] = {}
    for place, variable in enumerate(variables):
        overwritten = keras_optimizers.overwrites_with_gradient(variable)
        key = place if overwritten else f"{id(variable)}"
        places.setdefault(key, []).append(place)
    firsts = [variables[indices[0]] for indices in places.values()]
    sums = [
        _sum_gradients([gradients[i] for i in indices], variable)
        for indices, variable in zip(places.values(), firsts, strict=True)
    ]
    return sums, firsts


def _sum_gradients(gradients: list[Any], variable: keras.Variable) -> Any:
    """Return the sum of a variable's gradients; sparse if all of them are."""
    if len(gradients) == 1:
        return gradients[0]
    if not all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return tf.add_n([accumulation.to_dense(g, variable) for g in gradients])
    indices = [tf.cast(tf.convert_to_tensor(g.indices), tf.int64) for g in gradients]
    values = [tf.cast(g.values, variable.dtype) for g in gradients]
    return tf.IndexedSlices(
        tf.concat(values, axis=0), tf.concat(indices, axis=0), variable.shape
    )


class GradientCheck:
    """Compares which variables have gradients on the workers, while a step is traced.

    The buffers of a step hold only these variables. Workers with different ones would
    wait for each other in different collectives.

    Args:
        strategy: strategy of the workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self._checked: set[tuple[int, ...]] = set()  # identities of the variables

    def check(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
    ) -> None:
        """Compare the variables that have gradients, unless they were compared before.

        Workers retrace at different times, for example for a smaller last batch. So
        they meet only for sets of variables that occur for the first time.

        Args:
            optimizer: optimizer whose step is traced.
            variables: variables that have gradients.

        Raises:
            ValueError: on all workers, if one has gradients for other variables.
            RuntimeError: if a worker does not take part in time.
        """
        present = tuple(map(id, variables))
        if present in self._checked:
            return
        trained = keras_optimizers.trainable_variables(optimizer)

        def describe() -> dict[str, str]:
            # With its number, as paths of variables need not differ.
            return {
                f"{v.path} (variable {i})": "a gradient"
                if id(v) in present
                else "no gradient"
                for i, v in enumerate(trained)
            }

        require_equal_while_tracing(
            self._strategy,
            describe,
            _OTHER_GRADIENTS,
            f"compare which variables of {optimizer.name} have gradients",
        )
        self._checked.add(present)


_OTHER_GRADIENTS = (
    "The workers have gradients for different variables, so what they would exchange "
    "does not match. Compute the loss from the same layers on every worker: no branch "
    "that depends on the worker may leave some out. Where a worker has nothing to add, "
    "add the variable times zero to its loss, or pass zeros as the gradient."
)


def _check_number(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raise `ValueError` if there is not one gradient per variable."""
    if len(gradients) != len(variables):
        raise ValueError(
            "There must be one gradient per variable. Received: "
            f"{len(gradients)} gradients for {len(variables)} variables"
        )


def _check_shapes(
    gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> None:
    """Raise `ValueError` if a gradient or its rows do not fit the variable's shape."""
    for gradient, variable in zip(gradients, variables, strict=True):
        received, shape = _shape_of(gradient), tuple(variable.shape)
        rows = isinstance(gradient, tf.IndexedSlices)
        if not received.is_compatible_with([None, *shape[1:]] if rows else shape):
            raise ValueError(
                f"The gradient of {variable.path} must have the shape of the variable, "
                f"{shape}. Received: {'rows' if rows else 'a gradient'} of shape "
                f"{tuple(received)}"
            )


def _shape_of(gradient: Any) -> tf.TensorShape:
    """Return the shape of a gradient, or of a sparse gradient's values."""
    values = getattr(gradient, "values", gradient)
    return tf.TensorShape(
        values.shape if hasattr(values, "shape") else np.shape(values)
    )


# --- Variables that their gradient overwrites ----------------------------------------
#
# Keras marks them with `overwrite_with_gradient`: scales, histories of float8 layers.

# Combines the values of all workers, `[N, n]`, by the variable's aggregation. "none" is
# the largest value, as Keras combines values over accumulated gradients.
_AGGREGATIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "none": lambda rows: tf.reduce_max(rows, axis=0),
    "mean": lambda rows: tf.reduce_mean(rows, axis=0),
    "sum": lambda rows: tf.reduce_sum(rows, axis=0),
    "only_first_replica": lambda rows: rows[0],
}


def without_overwritten(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Return the variables that gradients do not overwrite."""
    overwritten = keras_optimizers.overwrites_with_gradient
    return [v for v in variables if not overwritten(v)]


def overwrite_variables(
    communicator: Communicator, grads: Sequence[Any], variables: Sequence[Any]
) -> tuple[list[Any], list[keras.Variable], int]:
    """Assign the new values of variables that gradients overwrite; in replica context.

    One collective exchanges them. Workers combine them as the variable's aggregation
    says. An entry that is not finite on a worker counts there as the former value.

    Returns:
        The other gradients, their variables, and the bytes passed to the collective.
    """
    pairs = list(zip(grads, variables, strict=True))
    overwritten = [p for p in pairs if keras_optimizers.overwrites_with_gradient(p[1])]
    if not overwritten:
        return list(grads), list(variables), 0
    trained = [p for p in pairs if not keras_optimizers.overwrites_with_gradient(p[1])]
    wide = any(v.dtype == "float64" for _, v in overwritten)
    dtype = tf.float64 if wide else tf.float32

    def flat(tensors: Sequence[Any]) -> tf.Tensor:
        flattened = [tf.cast(tf.reshape(t, [-1]), dtype) for t in tensors]
        return tf.concat(flattened, axis=0)

    new = flat([gradient for gradient, _ in overwritten])
    old = flat([v.value for _, v in overwritten])
    words = to_words(tf.where(tf.math.is_finite(new), new, old))
    gathered = communicator.answer(AllGather(words))
    rows = from_words(
        tf.reshape(gathered, [-1]), dtype, [communicator.num_workers, new.shape[0]]
    )
    sizes = [v.shape.num_elements() for _, v in overwritten]
    for (_, v), part in zip(overwritten, tf.split(rows, sizes, axis=1), strict=True):
        value = tf.reshape(_AGGREGATIONS[v.aggregation](part), v.shape)
        tf.raw_ops.AssignVariableOp(
            resource=v.value.handle, value=tf.cast(value, v.dtype)
        )
    return [g for g, _ in trained], [v for _, v in trained], num_bytes(words)


# --- Clipping and scaling -------------------------------------------------------------

# From this sparsity on, masking takes less than a tenth of an entry's momentum.
MASKED_FROM_SPARSITY = 0.99


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What clipping and correcting a worker's gradients needs of the settings.

    Attributes:
        hyperparameters: settings of the inner optimizer that the wrapper applies.
        error_feedback: whether unsent entries are added to the next gradient.
        factor_masking: argument of `CompressedOptimizer`.
        seed: seed of all random choices.
    """

    hyperparameters: InnerHyperparameters
    error_feedback: bool
    factor_masking: bool | None = None
    seed: int = 0


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
