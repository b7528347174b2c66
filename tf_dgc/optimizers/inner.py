"""Checks and copies the inner optimizer; takes out what the wrapper applies itself."""

import copy
from typing import Any

import keras

from tf_dgc._internals import keras_optimizers
from tf_dgc._internals.optimizer_copies import copy_optimizer
from tf_dgc.arguments import show
from tf_dgc.compressors import Compressor
from tf_dgc.optimizers.adam_variants import find_adam_variant
from tf_dgc.optimizers.base import OptimizerWrapper
from tf_dgc.optimizers.inner_hyperparameters import (
    CLIPPING,
    InnerHyperparameters,
    apply_without_learning_rate,
    check_settings,
    remaining_momentum,
    settings_of_optimizer,
)


def get_inner_optimizer(
    inner: Any, steps_locally: bool = False, what: str = "inner"
) -> keras.optimizers.Optimizer:
    """Return the optimizer that `inner` stands for, checked.

    Args:
        inner: an optimizer, or its name or config, as for `keras.optimizers.get`.
        steps_locally: whether the optimizer takes local steps.
        what: name of the argument, for errors: "inner" or "outer".

    Raises:
        ValueError: for anything else, and for optimizers that cannot be wrapped.
    """
    if isinstance(inner, str | dict):
        try:
            inner = keras.optimizers.get(copy.deepcopy(inner))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"`{what}` is not the name or config of an optimizer that Keras knows. "
                f"Pass the optimizer itself. Received: {what}={show(inner)}"
            ) from error
    _check_optimizer(inner, what)
    check_settings(
        settings_of_optimizer(inner), steps_locally, is_outer=what == "outer"
    )
    momentum = getattr(inner, "momentum", 0.0)
    if not 0 <= momentum < 1:
        raise ValueError(
            f"The momentum of the {what} optimizer must be in [0, 1), else the "
            f"velocity grows without bound. Received: momentum={momentum}"
        )
    return inner


def _check_optimizer(inner: Any, what: str) -> None:
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            f"`{what}` must be a Keras optimizer, for example "
            "`keras.optimizers.SGD(0.1, momentum=0.9)`. "
            f"Received: {what}={show(inner)} (of type {type(inner)})"
        )
    if isinstance(inner, OptimizerWrapper):
        raise ValueError(
            f"`{what}` is itself a {type(inner).__name__}, and gradients cannot be "
            "compressed twice. Pass its inner optimizer. "
            f"Received: {what}={show(inner)}"
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Loss scaling goes outside: pass the optimizer within it, and wrap the "
            "result, as in `LossScaleOptimizer(DGCOptimizer(inner))`. "
            f"Received: {what}={show(inner)}"
        )
    if isinstance(inner, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ValueError(
            "`MultiOptimizer` cannot be wrapped, because each of its optimizers has "
            "its own momentum, clipping and learning rate. Pass one optimizer for all "
            "variables or, in a custom training loop, use one `DGCOptimizer` for each "
            f"part of the model. Received: {what}={show(inner)}"
        )
    if inner.built:
        raise ValueError(
            f"`{what}` is already built, so its state would be lost. Pass a new "
            "optimizer with the same settings, for example "
            "`type(inner).from_config(inner.get_config())`. "
            f"Received: {what}={show(inner)} with {len(inner.variables)} variables"
        )


def extract_hyperparameters(
    inner: keras.optimizers.Optimizer,
    momentum_correction: bool,
    adam_correction: bool = False,
    compressor: Compressor | None = None,
    scale_before_accumulation: bool = False,
) -> tuple[keras.optimizers.Optimizer, InnerHyperparameters]:
    """Copy `inner` without the hyperparameters that the wrapper applies itself.

    A subclass of `SGD` or `Adam` that overrides any part of a step keeps all of its
    momentum, and a class that overrides clipping clips the sum itself.

    Args:
        inner: the user's optimizer; it is not changed.
        momentum_correction: whether the wrapper applies the momentum of an SGD.
        adam_correction: whether it applies momentum and second moment of an Adam.
        compressor: compression method, whose delay replaces momentum of an Adam (but
            not of a Nadam, which looks ahead of it).
        scale_before_accumulation: whether it applies the learning rate of an SGD, or of
            an Adam without remaining momentum.

    Returns:
        The copy, which applies the update, and the wrapper's hyperparameters.

    Raises:
        ValueError: for an attribute that cannot be copied.
    """
    neutral: dict[str, Any] = {
        "loss_scale_factor": None,
        "gradient_accumulation_steps": None,
    }
    if not keras_optimizers.clips_by_itself(inner):
        neutral.update(dict.fromkeys(CLIPPING))
    is_sgd = keras_optimizers.behaves_as(inner, keras.optimizers.SGD)
    if momentum_correction and is_sgd and inner.momentum:
        neutral.update(momentum=0.0, nesterov=False)
    inner_rule = copy_optimizer(inner)
    for name, value in neutral.items():
        setattr(inner_rule, name, value)

    variant = find_adam_variant(inner) if adam_correction else None
    adam_momentum = float(inner.beta_1) if variant else 0.0
    if variant and not variant.nesterov and compressor:
        adam_momentum = remaining_momentum(adam_momentum, compressor.mean_delay)
    is_adam_without_momentum = (
        variant is not None and not adam_momentum and not variant.nesterov
    )
    hyperparameters = InnerHyperparameters(
        values={name: getattr(inner, name) for name in neutral},
        adam=variant,
        adam_momentum=adam_momentum,
        scale_before_accumulation=bool(scale_before_accumulation)
        and (is_sgd or is_adam_without_momentum),
    )
    if hyperparameters.scales_by_learning_rate:
        apply_without_learning_rate(inner_rule)
    return inner_rule, hyperparameters
