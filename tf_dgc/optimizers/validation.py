"""Checks of an optimizer's arguments, variables and context before its first step."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tf_dgc import collectives
from tf_dgc._internals import keras_optimizers
from tf_dgc.arguments import check_whole, show
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import Auto, CollectiveAlgorithm
from tf_dgc.collectives.overlapped import Overlap, OverlapMode, Overlapped
from tf_dgc.compressors import Compressor
from tf_dgc.compressors.topk import is_top_k

_DTYPES = ("float16", "bfloat16", "float32", "float64")

# Arguments


def check_min_compress_size(min_compress_size: int) -> None:
    """Raise `ValueError` unless it is a number of entries."""
    check_whole("min_compress_size", min_compress_size, 0, " of entries")


def uses_error_feedback(compressor: Compressor, error_feedback: bool | None) -> bool:
    """Return whether unsent entries are added to the next gradient.

    With None, the method's default decides.

    Raises:
        ValueError: if the method requires or forbids the opposite.
    """
    rule = compressor.error_feedback
    if error_feedback is None:
        return rule in {"required", "default"}
    if rule == ("forbidden" if error_feedback else "required"):
        raise ValueError(
            f"Error feedback is {rule} with {compressor!r} (see "
            f"{type(compressor).__name__}). Pass None for its default. "
            f"Received: error_feedback={show(error_feedback)}"
        )
    return bool(error_feedback)


def get_collective(
    identifier: CollectiveAlgorithm | str,
    compressor: Compressor,
    error_feedback: bool,
    gossip: bool = False,
) -> CollectiveAlgorithm:
    """Return the collective algorithm that `collective` stands for.

    Only with `gossip` it may be a neighbor exchange.

    Raises:
        ValueError: for other names, and for an algorithm that cannot send what the
            method produces.
    """
    algorithm = collectives.get(identifier)
    if isinstance(algorithm, Overlapped):
        if gossip:
            raise ValueError(
                "Local steps exchange at the end of a round, when no gradients are "
                "computed, so nothing can overlap. Pass the algorithm without "
                f"`Overlapped`: {algorithm.algorithm!r}. "
                f"Received: collective={algorithm!r}"
            )
        get_collective(algorithm.algorithm, compressor, error_feedback)
    if algorithm.is_neighbor_exchange and not gossip:
        raise ValueError(
            "Workers that exchange with neighbors only have different weights. "
            "Use `tf_dgc.LocalOptimizer(inner, 1, collective=...)`, which allows that. "
            f"Received: collective={show(algorithm)}"
        )
    if algorithm.drops_entries and not can_merge(compressor, error_feedback):
        raise ValueError(
            f"{algorithm!r} merges entries on the way, and returns dropped ones to the "
            "residual. Use `DGCOptimizer` or `TopK` with it, with error feedback and "
            '`value_dtype` None or "float32" (each merge would round narrower values '
            "again); or use another `collective`. Received: "
            f"compressor={compressor!r}, error_feedback={error_feedback}"
        )
    return algorithm


def resolve_overlap(
    algorithm: CollectiveAlgorithm,
) -> tuple[CollectiveAlgorithm, Overlap]:
    """Return the algorithm, without `Overlapped`, and whether it overlaps."""
    if isinstance(algorithm, Overlapped):
        overlap = Overlap(OverlapMode.ALWAYS, algorithm.backward_seconds)
        return algorithm.algorithm, overlap
    if isinstance(algorithm, Auto) and algorithm.overlap:
        return algorithm, Overlap(OverlapMode.IF_FASTER)
    return algorithm, Overlap()


def can_merge(compressor: Compressor, error_feedback: bool) -> bool:
    """Whether algorithms may merge, and drop, entries of several workers."""
    rounds = getattr(compressor, "value_dtype", None) not in (None, "float32")
    return is_top_k(compressor) and error_feedback and not rounds


def is_exact(
    algorithm: CollectiveAlgorithm,
    compressor: Compressor,
    tensors: Sequence[TensorSpec],
) -> bool:
    """Return whether all values of compressed tensors are sent at full precision.

    Raises:
        ValueError: if they are not, and the algorithm merges them: each merge would
            round them again, and no residual would contain the errors.
    """
    wide = [t for t in tensors if t.dtype == tf.float64 and not t.uncompressed]
    if not wide or getattr(compressor, "value_dtype", None) is None:
        return True
    if algorithm.drops_entries:
        raise ValueError(
            f"{algorithm!r} merges entries on the way, and each merge would round "
            "those of float64 tensors again. Pass `value_dtype=None`, or another "
            f"`collective`. Received: compressor={compressor!r}, {wide[0].label}"
        )
    return False


def check_adam_correction(
    algorithm: CollectiveAlgorithm,
    compressor: Compressor,
    error_feedback: bool,
    adam_correction: bool,
) -> None:
    """Raise `ValueError` for Adam correction with an intra-node reduce."""
    sums_within_groups = algorithm.sums_within_groups and is_top_k(compressor)
    if sums_within_groups and error_feedback and adam_correction:
        raise ValueError(
            f"With {algorithm!r} the workers of a machine add up their gradients "
            "before they compress them, so no worker has the second moment of its own "
            "gradient, by which Adam's correction divides. Use `SGD` with momentum as "
            "the inner optimizer, or another `collective`. "
            "(`Corrections(adam=False)` turns the correction off; then an entry that "
            "is sent every T steps moves T**0.5 times too little.) "
            f"Received: collective={algorithm!r}, with Adam's correction"
        )


def check_uncompressed_dtype(
    algorithm: CollectiveAlgorithm, uncompressed_dtype: str | None
) -> None:
    """Raise `ValueError` for narrow values that an algorithm would round repeatedly."""
    algorithm, _ = resolve_overlap(algorithm)
    if algorithm.drops_entries and uncompressed_dtype is not None:
        raise ValueError(
            f"{algorithm!r} adds up uncompressed tensors on the way, and would round "
            "them each time. Use `uncompressed_dtype=None`, or another `collective`. "
            f"Received: uncompressed_dtype={show(uncompressed_dtype)}"
        )


def check_momentum_correction(momentum_correction: bool, error_feedback: bool) -> None:
    """Raise `ValueError` for momentum correction without error feedback."""
    if momentum_correction and not error_feedback:
        raise ValueError(
            "`Corrections(momentum=True)` accumulates the velocity in the residual, "
            "so it needs error feedback. Leave it out (momentum then stays with the "
            "inner optimizer), or use a compressor with error feedback. "
            "Received: corrections=Corrections(momentum=True), error_feedback=False"
        )


def check_one_momentum(
    compressor: Compressor, optimizer: keras.optimizers.Optimizer, what: str = "inner"
) -> None:
    """Raise `ValueError` if both the method and the optimizer have a momentum.

    The user passed the optimizer as the argument `what`.
    """
    names = [n for n in ("momentum", "beta_1") if getattr(optimizer, n, None)]
    if compressor.residual_is_momentum and names:
        received = ", ".join(f"{name}={getattr(optimizer, name)}" for name in names)
        raise ValueError(
            f"The residual of {compressor!r} is a momentum, and a second one would be "
            f"applied to the sums. Pass as `{what}` an optimizer without, such "
            "as `keras.optimizers.SGD(1e-3)`. Received: "
            f"{type(optimizer).__name__} with {received}"
        )


# Variables


def check_variables(variables: Sequence[keras.Variable]) -> None:
    """Raise `ValueError` for variables that cannot be trained."""
    if variables and all(map(keras_optimizers.overwrites_with_gradient, variables)):
        raise ValueError(
            "The model has no trainable variables but those that gradients overwrite, "
            "so there is nothing to optimize. Set `trainable=True` on some layers, or "
            "build the model before the optimizer. Received: "
            f"{[v.path for v in variables]}"
        )
    for v in variables:
        if v.dtype not in _DTYPES:
            raise ValueError(
                f"Variables must be of dtype {', '.join(_DTYPES)}. "
                f"Received: variable {v.path} of dtype {v.dtype}"
            )
        if v.shape.num_elements() > tf.int32.max:
            raise ValueError(
                "Positions are sent as int32, so a variable may have at most "
                f"{tf.int32.max} entries. Received: variable {v.path} of shape "
                f"{tuple(v.shape)}"
            )


def check_own_copies(variables: Sequence[keras.Variable]) -> None:
    """Raise `ValueError` for variables that replicas cannot change on their own."""
    for v in variables:
        if keras_optimizers.overwrites_with_gradient(v):
            raise ValueError(
                "Local steps cannot train variables that gradients overwrite, such as "
                "the scales of float8 layers: they must be equal on all workers in "
                "every step, and local steps do not exchange them. Use another dtype "
                f"policy. Received: variable {v.path}"
            )
        if v.aggregation != "none":
            raise ValueError(
                "Local steps change every worker's own copy of a variable, so it must "
                'be of `aggregation="none"`, which is Keras\'s default. '
                f"Received: variable {v.path} with aggregation={v.aggregation!r}"
            )


# Saving a model whose workers have different weights


def check_one_worker(optimizer: keras.optimizers.Optimizer, num_workers: int) -> None:
    """Raise `ValueError` for a checkpoint of one worker of several."""
    if num_workers > 1:
        raise ValueError(
            "`tf.train.Checkpoint` would save the weights and the inner state of one "
            "worker, and they differ. Use `tf_dgc.callbacks.BackupAndRestore` or "
            "`ModelCheckpoint`, or `tf_dgc.saving`, which save every worker's. "
            f"Received: {optimizer!r} with {num_workers} workers"
        )


def check_consensus(optimizer: keras.optimizers.Optimizer, has_consensus: bool) -> None:
    """Raise `ValueError` if a model is saved with the weights of one worker only."""
    if not has_consensus:
        raise ValueError(
            "The workers are within a round and have different weights, and the file "
            "would have those of one worker. Save by `tf_dgc.saving.save_model` or "
            "`save_weights`, which write the consensus, or call "
            "`optimizer.consensus()` on every worker before. (After `fit`, `evaluate` "
            "or `predict`, `model.save` does the same as these.) "
            f"Received: {optimizer!r}"
        )
