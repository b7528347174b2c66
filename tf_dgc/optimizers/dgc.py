"""Deep Gradient Compression as a Keras optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import keras

from tf_dgc import collectives, native_library, schedules
from tf_dgc._internals import keras_optimizers
from tf_dgc.arguments import check_steps
from tf_dgc.codecs import value_types
from tf_dgc.collectives import CollectiveAlgorithm
from tf_dgc.compressors import NoCompression, TopK
from tf_dgc.optimizers import validation
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.optimizers.corrections import Corrections, check_corrections
from tf_dgc.optimizers.diagnostics import Diagnostics
from tf_dgc.optimizers.inner import get_inner_optimizer


@keras.saving.register_keras_serializable(package="tf_dgc")
class DGCOptimizer(CompressedOptimizer):
    """Sends the largest entries of the gradient, and accumulates the others locally.

    Deep Gradient Compression (Lin et al., ICLR 2018) around any Keras optimizer:
    `CompressedOptimizer` with `TopK`, momentum correction, factor masking and an
    optional sparsity warm-up. Create it in the scope of the same strategy as the model:

    >>> strategy = tf_dgc.multi_worker_strategy()
    >>> with strategy.scope():
    ...     model = build_model()
    ...     sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    ...     model.compile(optimizer=tf_dgc.DGCOptimizer(sgd), loss="mse")
    >>> model.fit(dataset)

    Momentum of an `SGD` (plain or Nesterov) becomes momentum correction. An `Adam`,
    `AdamW`, `Adamax` or `Nadam` is corrected, too. Other optimizers apply their rule to
    the sum, with error feedback. Clipping of the inner optimizer becomes local gradient
    clipping, with norm thresholds divided by `N**0.5` for N workers (section 3.2).

    With `sparsity=0` each step equals the inner optimizer's step with dense gradients.
    Keras differs for embedding rows that occur several times in a batch: it squares
    each occurrence separately, where a gradient is squared (Adam, RMSprop, clipping by
    norm). The paper's algorithm differs from the defaults in two settings:
    `Corrections(factor_masking=True, scale_before_accumulation=False)`, with
    `WarmupSparsity(steps)` as `sparsity`.

    Args:
        inner: a `keras.optimizers.Optimizer` that is not built; the wrapper copies it.
            Or its name or config, as `keras.optimizers.get` accepts them.
        sparsity: share of entries NOT sent, in [0, 1); or a schedule, a function of the
            iteration such as `tf_dgc.schedules.WarmupSparsity`.
        corrections: a `tf_dgc.Corrections`, for delayed entries. With momentum
            correction by default.
        min_compress_size: tensors with fewer entries, or of rank below 2, are sent
            uncompressed, with momentum.
        value_dtype: type of sent values; each position takes about 12 bits at 99.9 %.
            None is the type of `residual` (4 or 8 bytes per value). "float32" (4
            bytes), "bfloat16" (2), "float16" (2; values below 6e-8 become 0), "mxint8"
            (1) and "mxfp4" (1/2), whose blocks of 32 values share a scale, or "sign"
            (1/8: a sign per value and a magnitude per tensor). Rounding errors stay in
            `residual`. Does not affect uncompressed tensors and dense steps.
        uncompressed_dtype: type of the values of uncompressed tensors. None is that of
            `residual`. "bfloat16" or "mxint8": rounding errors stay in `residual`; with
            many workers a collective sums these tensors, and both mean bfloat16.
        seed: seed of the order in which entries of equal magnitude are selected.
        name: name of the optimizer.
        diagnostics: see `CompressedOptimizer`.
        collective: see `CompressedOptimizer`.

    Attributes:
        inner_optimizer: copy of `inner` that applies the update. It owns the learning
            rate and the iterations.
        velocity: local momentum, one variable per model variable and worker; empty
            without momentum to correct.
        residual: accumulated, unsent entries, likewise; empty with `sparsity=0`. Both
            are float64 for float64 variables and float32 for all others, because small
            addends vanish in narrower types. Both are multiplied by the learning rate
            if it is scaled before accumulation (see `Corrections`).

    Raises:
        ValueError: for settings outside the ranges above. When it is built: for a model
            without trainable variables, variables of unsupported dtypes or of another
            strategy, and workers with different models or settings.
    """

    config_keys: ClassVar[tuple[str, ...]] = (
        *(
            key
            for key in CompressedOptimizer.config_keys
            if key not in ("compressor", "error_feedback")
        ),
        "sparsity",
        "value_dtype",
        "uncompressed_dtype",
    )
    fixed = CompressedOptimizer.fixed | {*config_keys}

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | dict[str, Any],
        sparsity: float | Callable[[Any], Any] = 0.999,
        *,
        corrections: Corrections = Corrections(),
        min_compress_size: int = 1024,
        value_dtype: str | None = None,
        uncompressed_dtype: str | None = None,
        seed: int = 0,
        name: str = "dgc_optimizer",
        diagnostics: Diagnostics = Diagnostics(),
        collective: CollectiveAlgorithm | str = "ring",
    ):
        inner = get_inner_optimizer(inner)
        sparsity = schedules.get_sparsity(sparsity, self._followed_rate(inner))
        value_types.check_choice(value_dtype)
        value_types.check_uncompressed_choice(uncompressed_dtype)
        validation.check_uncompressed_dtype(
            collectives.get(collective), uncompressed_dtype
        )
        super().__init__(
            inner,
            TopK(sparsity, value_dtype) if sparsity != 0 else NoCompression(),
            corrections=corrections,
            min_compress_size=min_compress_size,
            seed=seed,
            name=name,
            diagnostics=diagnostics,
            collective=collective,
        )
        self._settings = dataclasses.replace(
            self.settings, uncompressed_dtype=uncompressed_dtype
        )
        self.sparsity = sparsity
        self.value_dtype = value_dtype
        self.uncompressed_dtype = uncompressed_dtype
        native_library.warn_if_missing()

    def _followed_rate(self, inner: keras.optimizers.Optimizer) -> Any:
        """Return the learning rate of the inner optimizer, for a sparsity schedule."""
        rate = keras_optimizers.learning_rate_of(inner)
        if not isinstance(rate, keras.Variable):
            return rate
        # This optimizer trains with a copy, whose variable callbacks change.
        return lambda: getattr(self, "inner_optimizer", inner).learning_rate

    def _corrects_momentum(self, corrections: Corrections, feedback: bool) -> bool:
        # At a sparsity of 0 nothing is delayed, so there is nothing to correct.
        return feedback and corrections.momentum is not False


_EARLY_SPARSITY = 0.75  # of the first stage of the paper's warm-up
_MAX_EARLY_STEPS = 100  # more were not measured; they cost long runs little


def dgc_for_steps(inner: Any, steps: int, **settings: Any) -> DGCOptimizer:
    """Return a `DGCOptimizer` with settings for the number of training steps.

    The paper's settings are for tens of thousands of steps. In a few hundred steps most
    delayed entries would never reach the model, and masking would remove the momentum
    of entries that are sent often. Here the sparsity is `schedules.for_steps(steps)`,
    the velocity is not masked, and values are sent in 4 bits, those of uncompressed
    tensors in 8 (`value_dtype="mxfp4"`, `uncompressed_dtype="mxint8"`), which pays for
    most of the lower sparsity.

    With an `SGD` the sparsity is 75 % for the first twentieth of the steps, at most 100
    steps: weights change fast at the beginning, and delayed entries would be outdated.
    Pass `sparsity=schedules.for_steps(steps)` for a constant sparsity, which all other
    optimizers have.

    >>> sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> optimizer = tf_dgc.dgc_for_steps(sgd, epochs * steps_per_epoch)

    Args:
        inner: a `keras.optimizers.Optimizer`, as for `DGCOptimizer`.
        steps: number of calls of the optimizer in the whole training: epochs times
            batches per epoch.
        **settings: further arguments of `DGCOptimizer`, which override these settings.
            The velocity is masked only with `Corrections(factor_masking=True)`.

    Raises:
        ValueError: if `steps` is not a whole number of at least 1, for example for a
            data set of unknown length; and as `DGCOptimizer`.
    """
    steps = check_steps("steps", steps)
    inner = get_inner_optimizer(inner)
    calls = inner.gradient_accumulation_steps or 1
    defaults = {
        "sparsity": _sparsity(inner, max(1, steps // calls)),
        "value_dtype": "mxfp4",
        "uncompressed_dtype": "mxint8",
    }
    corrections = settings.pop("corrections", Corrections())
    check_corrections(corrections)
    if corrections.factor_masking is None:
        corrections = dataclasses.replace(corrections, factor_masking=False)
    return DGCOptimizer(inner, corrections=corrections, **{**defaults, **settings})


def _sparsity(
    inner: keras.optimizers.Optimizer, steps: int
) -> float | schedules.SparsitySchedule:
    """Return the sparsity for a number of steps."""
    last = schedules.for_steps(steps)
    if not isinstance(inner, keras.optimizers.SGD) or last <= _EARLY_SPARSITY:
        return last
    early = min(steps // 20, _MAX_EARLY_STEPS)
    return schedules.WarmupSparsity(early, last, stages=[_EARLY_SPARSITY])
