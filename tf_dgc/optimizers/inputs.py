"""What goes into a step, of what Keras hands to `apply`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_dgc._internals import keras_optimizers, tracing
from tf_dgc.choice import Choice
from tf_dgc.compressors import Compressor
from tf_dgc.inner.taken import TakeOver
from tf_dgc.optimizers import validation
from tf_dgc.optimizers.kept import Kept
from tf_dgc.schedules import asking
from tf_dgc.steps import weighing
from tf_dgc.steps.accumulation import Gradient, entries, to_rows
from tf_dgc.steps.base import Inputs
from tf_dgc.steps.memory import Memory
from tf_dgc.steps.plan import shares
from tf_dgc.transforms import clipping
from tf_dgc.transforms.clipping import Scale

# Sparsity from which on masking takes less than a tenth of an entry's momentum.
MASKED_FROM = 0.99


def clip(
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
    values = [entries(g) for g in given]
    clipped, scales = clipping.clip(
        values, num_workers, loss_scale=loss_scale, **thresholds
    )
    pairs = zip(given, clipped, strict=True)
    return [_with_entries(g, values) for g, values in pairs], scales


class Place(NamedTuple):
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


def assemble(
    optimizer: Any,
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
    took: TakeOver,
    memory: Memory,
    place: Place,
) -> Inputs:
    """Return what goes into the step of one worker.

    Args:
        optimizer: optimizer whose step it is.
        grads: gradients of the variables.
        variables: variables of the model.
        took: settings of the inner optimizer that are applied in its place.
        memory: variables of what this worker remembers, of all variables.
        place: place that the step runs at.
    """
    indices = [keras_optimizers.variable_index(optimizer, v) for v in variables]
    clipped = clip_for(optimizer, grads, variables, took, place.loss_scale)
    return put_together(optimizer, clipped, indices, took, memory, place)


def clip_for(
    optimizer: Any,
    grads: Sequence[Any],
    variables: Sequence[keras.Variable],
    took: TakeOver,
    loss_scale: float | None,
) -> tuple[list[Gradient], list[Scale]]:
    """Return what `clip` does, by the settings of an optimizer; arguments are as there.

    Where nothing is kept back, clipping is Keras's own, whatever the workers.
    """
    asks = optimizer.compressor, optimizer.error_feedback
    sharing = optimizer.num_workers if validation.uses_error_feedback(*asks) else 1
    return clip(grads, variables, sharing, loss_scale, took.clipping)


def put_together(
    optimizer: Any,
    clipped: tuple[Sequence[Gradient], Sequence[Scale]],
    indices: Sequence[int],
    took: TakeOver,
    memory: Memory,
    place: Place,
) -> Inputs:
    """Return what `assemble` does, of gradients that `clip` returned.

    Args:
        optimizer: optimizer whose step it is.
        clipped: gradients, and what each is to be multiplied by.
        indices: index of each among the tensors of `memory`.
        took: settings of the inner optimizer that are applied in its place.
        memory: variables of what this worker remembers.
        place: place that the step runs at.
    """
    given, scales = clipped
    own, step = memory.of(indices), optimizer.iterations.value
    return Inputs(
        place.compressor,
        own.tensors,
        indices,
        given,
        scales,
        own,
        took.momentum,
        took.nesterov,
        _masks(optimizer.factor_masking, took, place.compressor, step),
        optimizer.seed,
        step,
        place.worker,
        place.num_workers,
        [t.size for t in memory.tensors],
        **place.settings,
    )


def _masks(
    asked: bool | None, took: TakeOver, compressor: Compressor, iteration: tf.Tensor
) -> Choice:
    """Return whether the velocity is cleared where entries are sent in this step."""
    if asked is not None:
        return asked
    if took.adam:
        return False
    # Methods that send what has grown have no sparsity, and are masked.
    sparsity = getattr(compressor, "sparsity", MASKED_FROM)
    return asking.current(sparsity, iteration) >= MASKED_FROM


def collect(
    optimizer: Any,
    grads: list,
    variables: list,
    took: TakeOver,
    kept: Kept,
) -> Inputs:
    """Return what goes into the step.

    Args:
        optimizer: `CompressedOptimizer` whose step it is.
        grads: gradients of the variables.
        variables: variables of the model.
        took: settings of the inner optimizer that are applied in its place.
        kept: variables that the optimizer keeps.
    """
    place = Place(
        kept.chosen.compressor,
        tf.distribute.get_replica_context().replica_id_in_sync_group,
        optimizer.num_workers,
        optimizer.loss_scale_factor,
        {
            "drops_entries": optimizer.communicator.drops_entries,
            "by_all": kept.natively,
            "machine": optimizer.communicator.machine(),
        },
    )
    collected = assemble(optimizer, grads, variables, took, kept.memory, place)
    if took.weighs:
        collected = weighing.weigh(collected, optimizer.learning_rate)
    if kept.adam:
        return kept.adam.precondition(collected)
    return collected


class Part(NamedTuple):
    """A part of a step, or all of it.

    Attributes:
        places: places of its variables among those of the step.
        inputs: inputs of it.
    """

    places: Sequence[int]
    inputs: Inputs


def collect_parts(
    optimizer: Any,
    grads: list,
    variables: list,
    took: TakeOver,
    kept: Kept,
) -> list[Part]:
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
    whole = took.clipping["global_clipnorm"] or tracing.in_xla_context()
    whole = whole or len(place_of) < len(variables)
    if whole or len(buckets) < 2:
        own = collect(optimizer, grads, variables, took, kept)
        return [Part(range(len(variables)), own)]
    tensors = [kept.tensors[i] for i in indices]
    apart = len(shares(tensors, optimizer.num_workers)) > 1
    parts = []
    for some in buckets:
        picked = [grads[i] for i in some], [variables[i] for i in some]
        own = collect(optimizer, *picked, took, kept)
        parts.append(Part(some, own._replace(exempt_apart=apart)))
    return parts


def _with_entries(gradient: Gradient, values: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices)
    return values
