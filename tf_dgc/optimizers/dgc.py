"""Deep Gradient Compression as a Keras optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import keras

from tf_dgc import collectives, native_library, schedules
from tf_dgc.arguments import check_steps
from tf_dgc.codecs import value_types
from tf_dgc.collectives import CollectiveAlgorithm
from tf_dgc.compressors import NoCompression, TopK
from tf_dgc.optimizers import validation
from tf_dgc.optimizers.compressed import CompressedOptimizer
from tf_dgc.optimizers.inner import get_inner_optimizer


@keras.saving.register_keras_serializable(package="tf_dgc")
class DGCOptimizer(CompressedOptimizer):
    """Sends the largest entries of the gradient and keeps the rest until it has grown.

    Deep Gradient Compression (Lin et al., ICLR 2018) around any Keras optimizer:
    `CompressedOptimizer` with `TopK`, momentum correction, factor masking and a
    sparsity that may warm up, in one pass over memory. Use it as the optimizer of a
    model, created in the scope of the same strategy:

    >>> strategy = tf_dgc.multi_worker_strategy()
    >>> with strategy.scope():
    ...     model = build_model()
    ...     sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    ...     model.compile(optimizer=tf_dgc.DGCOptimizer(sgd), loss="mse")
    >>> model.fit(dataset)

    Momentum of an SGD (plain or Nesterov) becomes momentum correction, and an `Adam`,
    `AdamW`, `Adamax` or `Nadam` is corrected too; other optimizers get error feedback
    and apply their own rule to the sum. Clipping of the
    inner optimizer becomes local gradient clipping, by thresholds of norms that are
    `N**0.5` times smaller with N workers (section 3.2). With `sparsity=0` every step is
    what the inner optimizer does alone, of gradients that are dense: rows of an
    embedding that occur several times in a batch are added up before anything is
    squared, where Keras squares each by itself, as an Adam, an RMSprop and a norm that
    is clipped do. What the paper does differs in two settings:
    `DGCOptimizer(sgd, WarmupSparsity(steps), rate_correction=False,
    factor_masking=True)`.

    Args:
        inner: a `keras.optimizers.Optimizer`, not yet built; it is copied. Or its name
            or config, as `keras.optimizers.get` takes them.
        sparsity: share of entries NOT sent, in [0, 1); or a schedule of the iteration
            such as `tf_dgc.schedules.WarmupSparsity`.
        momentum_correction: whether to accumulate the local velocity instead of the
            gradient (section 3.2 of the paper). If False, momentum of an `SGD` stays
            after the sum; that of an Adam is part of `adam_correction`, whatever this
            is.
        factor_masking: whether to clear the velocity where entries were sent (section
            3.3); None: that of an `SGD`, in steps of at least 99 % sparsity. Entries
            that are sent in every few steps lose most of their momentum by it, as in a
            warm-up, in which the paper masks too.
        adam_correction: whether to divide by Adam's second moment before the exchange,
            as in `CompressedOptimizer`.
        rate_correction: whether a gradient that waits counts by the learning rate of
            its own step, as in `CompressedOptimizer`. False: of the step in which it is
            sent, as in the paper.
        min_compress_size: number of entries below which tensors, and those of rank
            below 2, are exempt: sent whole, with momentum.
        value_dtype: type in which values are sent, beside some 12 bits for each
            position at 99.9 %: None, that of `residual` (4 bytes per entry, or 8), or
            one of "float32" (4), "bfloat16" (2), "float16" (2; nothing below 6e-8),
            "mxint8" (1) and "mxfp4" (1/2), in which blocks of 32 share a scale, and
            "sign" (1/8: a sign, and one magnitude per tensor). What the coding loses
            stays in `residual`. Exempt tensors and dense steps are not coded.
        uncompressed_dtype: type in which exempt tensors are sent: None, that of
            `residual`,
            or "bfloat16" or "mxint8", where what the coding loses stays in `residual`
            too. Where they are summed by a collective of their own, as they are from
            some number of workers on, both are bfloat16.
        seed: seed of the order in which equal magnitudes are chosen.
        name: name of the optimizer.
        track_staleness: whether to remember when entries were sent, as in
            `CompressedOptimizer`, also below.
        check_every: number of steps between looks whether workers differ, or None.
        on_divergence: reaction to a difference, "raise" or "warn".
        exchange: ways of sums and gathers, as in `CompressedOptimizer`.
        overlap: whether to exchange while the backward pass goes on, likewise.

    Attributes:
        inner_optimizer: copy of `inner` that applies the update, without what was taken
            over. It owns the learning rate and the iterations.
        velocity: variables, one per model variable and worker, the local momentum;
            empty where there is no momentum to correct.
        residual: variables, one per model variable and worker, accumulated and not yet
            sent; empty with `sparsity=0`. Both have the learning rate in them wherever
            `rate_correction` acts, and are float64 for float64 variables and float32
            for all others: in 8 bits of mantissa an accumulator stands still.

    Raises:
        ValueError: for settings outside the ranges above; at build time for a model
            without trainable variables, variables of other dtypes or of another
            strategy, and workers that were started with different models or settings.
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
        inner: keras.optimizers.Optimizer | str | dict,
        sparsity: float | Callable = 0.999,
        *,
        momentum_correction: bool = True,
        factor_masking: bool | None = None,
        adam_correction: bool = True,
        rate_correction: bool = True,
        min_compress_size: int = 1024,
        value_dtype: str | None = None,
        uncompressed_dtype: str | None = None,
        seed: int = 0,
        name: str = "dgc_optimizer",
        track_staleness: bool = False,
        check_every: int | None = 1000,
        on_divergence: str = "raise",
        exchange: CollectiveAlgorithm | str = "ring",
        overlap: bool | float | None = None,
    ):
        sparsity = schedules.get_sparsity(sparsity)
        value_types.check_choice(value_dtype)
        value_types.check_uncompressed_choice(uncompressed_dtype)
        validation.check_exempt_dtype(collectives.get(exchange), uncompressed_dtype)
        super().__init__(
            inner,
            TopK(sparsity, value_dtype) if sparsity != 0 else NoCompression(),
            momentum_correction=momentum_correction,
            factor_masking=factor_masking,
            adam_correction=adam_correction,
            rate_correction=rate_correction,
            min_compress_size=min_compress_size,
            seed=seed,
            name=name,
            track_staleness=track_staleness,
            check_every=check_every,
            on_divergence=on_divergence,
            exchange=exchange,
            overlap=overlap,
        )
        self._settings = dataclasses.replace(
            self.settings, uncompressed_dtype=uncompressed_dtype
        )
        self.sparsity = sparsity
        self.value_dtype = value_dtype
        self.uncompressed_dtype = uncompressed_dtype
        native_library.warn_if_missing()

    def _check_momentum_correction(self, correction: bool, feedback: bool) -> None:
        pass  # at a sparsity of 0 nothing is delayed, so there is nothing to correct


# --- Deep Gradient Compression with settings for the length of a run.

_EARLY_SPARSITY = 0.75  # that of the first stage of the paper's warm-up
_MOST_EARLY_STEPS = 100  # what was measured at the most; they cost long runs little


def dgc_for_steps(inner: Any, steps: int, **settings: Any) -> DGCOptimizer:
    """Return `DGCOptimizer` for a run of so many steps.

    The paper's settings are for tens of thousands of steps. In a few hundred of them
    most of what waits never reaches the model, and masking takes the momentum from
    entries that are sent often. Here the sparsity is that of `schedules.for_steps`, the
    velocity is not masked, and values are sent in 4 bits, those of small tensors in 8
    (`value_dtype="mxfp4"`, `uncompressed_dtype="mxint8"`), which pays for most of it.

    With an `SGD` it is 75 % for the first twentieth of the steps, for 100 at the most:
    weights move far in them, and what waits would point where they no longer are. For
    one sparsity from the first step to the last pass
    `sparsity=schedules.for_steps(steps)`, as it is with all other optimizers.

    >>> sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> optimizer = tf_dgc.dgc_for_steps(sgd, epochs * steps_per_epoch)

    Args:
        inner: a `keras.optimizers.Optimizer`, as for `DGCOptimizer`.
        steps: number of steps of `fit` in which the model is trained. Of an `inner`
            that accumulates the gradients of several, one in so many counts.
        **settings: arguments of `DGCOptimizer`, also in place of these.

    Raises:
        ValueError: if `steps` is not whole or below 1, as of a data set whose length is
            unknown, and as `DGCOptimizer`.
    """
    steps = check_steps("steps", steps)
    inner = get_inner_optimizer(inner)
    calls = inner.gradient_accumulation_steps or 1
    usual = {
        "sparsity": _sparsity(inner, max(1, steps // calls)),
        "factor_masking": False,
        "value_dtype": "mxfp4",
        "uncompressed_dtype": "mxint8",
    }
    return DGCOptimizer(inner, **{**usual, **settings})


def _sparsity(
    inner: keras.optimizers.Optimizer, steps: int
) -> float | schedules.SparsitySchedule:
    """Return the sparsity of a run of so many steps of the optimizer."""
    last = schedules.for_steps(steps)
    if not isinstance(inner, keras.optimizers.SGD) or last <= _EARLY_SPARSITY:
        return last
    early = min(steps // 20, _MOST_EARLY_STEPS)
    return schedules.WarmupSparsity(early, last, stages=[_EARLY_SPARSITY])
