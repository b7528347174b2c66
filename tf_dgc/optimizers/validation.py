"""What an optimizer checks before its first step."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_dgc import collectives
from tf_dgc._internals import keras_optimizers, tf_collectives, tracing
from tf_dgc.arguments import check_whole, show
from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.collectives import CollectiveAlgorithm
from tf_dgc.compressors import Compressor, TopK

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def check_min_compress_size(min_compress_size: int) -> None:
    """Raise `ValueError` unless it is a number of entries."""
    check_whole("min_compress_size", min_compress_size, 0, " of entries")


def uses_error_feedback(compressor: Compressor, asked: bool | None) -> bool:
    """Return whether what is not sent is kept back.

    Args:
        compressor: method, which says whether it has to be, or must not be.
        asked: choice of the user; None for the method's own.

    Raises:
        ValueError: if the method cannot work so.
    """
    rule = compressor.error_feedback
    if asked is None:
        return rule in {"required", "default"}
    refused = {"required": False, "forbidden": True}
    if rule in refused and bool(asked) is refused[rule]:
        raise ValueError(
            f"Error feedback is {rule} with {compressor!r} (see "
            f"{type(compressor).__name__}). Pass None for its own choice. "
            f"Received: error_feedback={show(asked)}"
        )
    return bool(asked)


def get_exchange(
    identifier: CollectiveAlgorithm | str,
    compressor: Compressor,
    feedback: bool,
    near: bool = False,
) -> CollectiveAlgorithm:
    """Return an exchange that can carry what a method sends.

    Args:
        identifier: exchange, or its name.
        compressor: method.
        feedback: whether what is not sent is kept back.
        near: whether it may be one with neighbours alone.

    Raises:
        ValueError: for other names, and for an exchange that cannot.
    """
    exchange = collectives.get(identifier)
    if exchange.is_neighbor_exchange and not near:
        raise ValueError(
            "Workers that exchange with neighbours alone have weights of their own. "
            "Use `tf_dgc.LocalOptimizer(inner, 1, exchange=...)`, which lets them. "
            f"Received: exchange={show(exchange)}"
        )
    if exchange.drops_entries and not can_merge(compressor, feedback):
        raise ValueError(
            f"{exchange!r} merges entries on the way, and what it leaves out goes back "
            "to the residual; so it goes with `DGCOptimizer`, or `TopK` with error "
            "feedback, with `value_dtype=None` (each merge would round the values "
            "again). Use it so, or another `exchange`. Received: "
            f"compressor={compressor!r}, error feedback {feedback}"
        )
    return exchange


def can_merge(compressor: Compressor, error_feedback: bool) -> bool:
    """Whether entries of several workers may be merged, and dropped, on the way."""
    rounds = getattr(compressor, "value_dtype", None) not in (None, "float32")
    return type(compressor) is TopK and error_feedback and not rounds


def is_exact(
    ways: CollectiveAlgorithm, compressor: Compressor, tensors: Sequence[TensorSpec]
) -> bool:
    """Whether values travel as wide as they are, of all tensors that are compressed.

    Raises:
        ValueError: if they do not, and what was asked for merges them on the way: each
            merge would round them again, and what that loses is in no residual.
    """
    wide = [t for t in tensors if t.dtype == tf.float64 and not t.uncompressed]
    if not wide or getattr(compressor, "value_dtype", None) is None:
        return True
    if ways.drops_entries:
        raise ValueError(
            f"{ways!r} merges entries on the way, and each merge would round those of "
            f"float64 tensors again. Pass `value_dtype=None`, or another `exchange`. "
            f"Received: compressor={compressor!r}, {wide[0].label}"
        )
    return False


def check_adam_correction(
    exchange: CollectiveAlgorithm,
    compressor: Compressor,
    feedback: bool,
    corrects: bool,
) -> None:
    """Raise `ValueError` for a correction of gradients that are added up before.

    Args:
        exchange: exchange of the optimizer.
        compressor: its method.
        feedback: whether what is not sent is kept back.
        corrects: whether the second moment of a worker's gradient is followed.
    """
    if exchange.adds_up_first and type(compressor) is TopK and feedback and corrects:
        raise ValueError(
            f"With {exchange!r} the workers of a machine add up their gradients before "
            "they compress, so none knows the second moment of its own, which "
            "`adam_correction` divides by. Use `SGD` with momentum, or another "
            "`exchange`. (`adam_correction=False` applies the rule to the sum, and an "
            "entry that comes every T steps moves T**0.5 times too little.) Received: "
            "adam_correction=True"
        )


def check_exempt_dtype(
    exchange: CollectiveAlgorithm, uncompressed_dtype: str | None
) -> None:
    """Raise `ValueError` for narrow values that an exchange would round again."""
    if exchange.drops_entries and uncompressed_dtype is not None:
        raise ValueError(
            f"{exchange!r} adds up exempt tensors on the way, and would round them "
            "each time. Use `uncompressed_dtype=None`, or another `exchange`. "
            "Received: "
            f"uncompressed_dtype={show(uncompressed_dtype)}"
        )


def check_momentum_correction(correction: bool, feedback: bool) -> None:
    """Raise `ValueError` for momentum correction with nothing to correct."""
    if correction and not feedback:
        raise ValueError(
            "`momentum_correction` accumulates the velocity in the residual, so it "
            "needs error feedback. Leave it out (momentum then stays with the inner "
            "optimizer), or use a compressor with error feedback. "
            "Received: momentum_correction=True, without error feedback"
        )


def check_one_momentum(
    compressor: Compressor, optimizer: keras.optimizers.Optimizer, what: str = "inner"
) -> None:
    """Raise `ValueError` for an optimizer with momentum behind a method that is one.

    Args:
        compressor: method.
        optimizer: optimizer that applies the sums.
        what: name of the argument that it was passed as.
    """
    names = [n for n in ("momentum", "beta_1") if getattr(optimizer, n, None)]
    if compressor.is_momentum and names:
        given = ", ".join(f"{name}={getattr(optimizer, name)}" for name in names)
        raise ValueError(
            f"What {compressor!r} keeps back is the momentum, and a second one behind "
            f"it would act on what arrives of the first. Pass as `{what}` an optimizer "
            "without, such as `keras.optimizers.SGD(1e-3)`. Received: "
            f"{type(optimizer).__name__} with {given}"
        )


def check_not_built(optimizer: keras.optimizers.Optimizer, what: str) -> None:
    """Raise `ValueError` if `what` is called too late."""
    if optimizer.built:
        raise ValueError(
            f"`{what}` must be called before the optimizer is built, which `build`, "
            f"`fit` and the first step do. Received: {optimizer!r}, which is built"
        )


def check_scope(
    optimizer: keras.optimizers.Optimizer,
    strategy: tf.distribute.Strategy,
    variables: Sequence[Any],
    what: str,
) -> None:
    """Raise `ValueError` unless optimizer, model and call belong to one strategy.

    Args:
        optimizer: optimizer that is built or applied.
        strategy: strategy in whose scope it was created.
        variables: variables of the model.
        what: name of the optimizer's method that is called.
    """
    created = strategy.extended.variable_created_in_scope
    outside = next((v for v in variables if not created(_value(v))), None)
    current = tf.distribute.get_strategy()
    name = type(optimizer).__name__
    its_own = None
    if outside is not None:
        its_own = getattr(_value(outside), "distribute_strategy", None)
        received = (
            f"Received: variable {getattr(outside, 'path', outside.name)} created "
            f"{_where(its_own)}, and a {name} created {_where(strategy)}"
        )
    else:
        received = (
            f"Received: a {name} created {_where(strategy)}, and `{what}` called "
            f"{_where(current)}"
        )
    if tf_collectives.is_default(strategy) and not (
        outside is None and current is strategy
    ):
        raise ValueError(
            f"This {name} was created outside of `strategy.scope()`, and the model "
            f"within it. Move the call of `{name}(...)`, or of the function that "
            "returns it, into `with strategy.scope():`, with the strategy of the "
            f"model. {received}"
        )
    if outside is not None and tf_collectives.is_default(its_own):
        raise ValueError(
            f"The model was created outside of `strategy.scope()`, and this {name} "
            "within it. Move the call that creates the model, such as "
            "`keras.Sequential(...)`, `keras.Model(...)` or "
            "`keras.models.load_model(...)`, into `with strategy.scope():`, with the "
            f"strategy of the optimizer. {received}"
        )
    if outside is not None:
        raise ValueError(
            f"The model and this {name} were created under different strategies. "
            "Create one strategy, and create both within its `with strategy.scope():`. "
            f"{received}"
        )
    if current is not strategy:
        raise ValueError(
            f"`{what}` was called outside of the strategy in whose scope this {name} "
            "and the model were created. Call `build` within `with strategy.scope():`, "
            "and `apply` or `apply_gradients` in a function that is passed to "
            f"`strategy.run`. {received}"
        )


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _where(strategy: tf.distribute.Strategy | None) -> str:
    """Return in which scope something was created or called."""
    if tf_collectives.is_default(strategy):
        return "outside of any scope"
    number = cast(tf.distribute.Strategy, strategy).num_replicas_in_sync
    return f"in the scope of a {type(strategy).__name__} of {number} replicas"


def check_in_replica(num_workers: int) -> None:
    """Raise `ValueError` outside replica context, and where XLA compiles an exchange.

    Args:
        num_workers: number of replicas that exchange.
    """
    if num_workers > 1 and tracing.in_xla_context():
        raise ValueError(
            "XLA compiles this step (`jit_compile=True`), and an exchange between "
            "workers is nothing that it can compile. Compile the model, and "
            "`tf.function`s, with `jit_compile=False`. Received: a step of "
            f"{num_workers} workers"
        )
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "`apply` and `apply_gradients` must be called in replica context: within "
            "a function passed to `strategy.run`."
        )


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
    """Raise `ValueError` for variables that replicas cannot change by themselves."""
    for v in variables:
        if keras_optimizers.overwrites_with_gradient(v):
            raise ValueError(
                "Variables that gradients overwrite, as the scales of float8 layers, "
                "have to be alike in every step, and local steps do not exchange them. "
                f"Use another dtype policy. Received: variable {v.path}"
            )
        if v.aggregation != "none":
            raise ValueError(
                "Local steps change every worker's own copy of a variable, so it must "
                'be of `aggregation="none"`, which is Keras\'s default. '
                f"Received: variable {v.path} with aggregation={v.aggregation!r}"
            )


def check_one_worker(optimizer: keras.optimizers.Optimizer, num_workers: int) -> None:
    """Raise `ValueError` for a checkpoint that would hold one worker of several."""
    if num_workers > 1:
        raise ValueError(
            "`tf.train.Checkpoint` would save the weights and the inner state of one "
            "worker, and they differ. Use `tf_dgc.callbacks.BackupAndRestore` or "
            "`ModelCheckpoint`, or `tf_dgc.saving`, by which every worker's are saved. "
            f"Received: {optimizer!r} with {num_workers} workers"
        )


def check_agreed(optimizer: keras.optimizers.Optimizer, agreed: bool) -> None:
    """Raise `ValueError` for a file that would hold one worker's weights.

    Args:
        optimizer: `LocalOptimizer`, saved with its model.
        agreed: whether the model has what all workers agree on.
    """
    if not agreed:
        raise ValueError(
            "The workers are within a round, each with weights of its own, and the "
            "file would have those of one. Save by `tf_dgc.saving.save_model` or "
            "`save_weights`, which write what all agree on, or call "
            "`optimizer.consensus()` on every worker before. (After `fit`, `evaluate` "
            "or `predict`, `model.save` does the same as these.) "
            f"Received: {optimizer!r}"
        )
