"""Take over: which settings of the inner optimizer DGC applies in its place."""

import copy
import dataclasses
from typing import Any

import keras

from tf_dgc._internals import keras_optimizers
from tf_dgc._internals.optimizer_copies import copy_optimizer
from tf_dgc.arguments import show
from tf_dgc.compressors import Compressor
from tf_dgc.optimizers import adam_variants, inner_hyperparameters
from tf_dgc.optimizers.base import OptimizerWrapper
from tf_dgc.optimizers.inner_hyperparameters import CLIPPING, InnerHyperparameters

_OF_EVERY_CALL = ("loss_scale_factor", "gradient_accumulation_steps")


def get_inner_optimizer(
    inner: Any, steps_locally: bool = False, what: str = "inner"
) -> keras.optimizers.Optimizer:
    """Return the optimizer that Keras takes for `inner`, if it can be wrapped.

    Args:
        inner: an optimizer, or its name or config, as for `keras.optimizers.get`.
        steps_locally: whether a step of it is to meet nobody.
        what: name of the argument that it was passed as.

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
    check_inner_optimizer(inner, steps_locally, what)
    return inner


def check_inner_optimizer(
    inner: Any, steps_locally: bool = False, what: str = "inner"
) -> None:
    """Raise `ValueError` unless it is an unbuilt Keras optimizer to be wrapped."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            f"`{what}` must be a Keras optimizer, for example "
            "`keras.optimizers.SGD(0.1, momentum=0.9)`. "
            f"Received: {what}={show(inner)} (of type {type(inner)})"
        )
    if isinstance(inner, OptimizerWrapper):
        raise ValueError(
            f"`{what}` is itself a {type(inner).__name__}, and what is compressed once "
            "cannot be compressed again. Pass its own inner optimizer. "
            f"Received: {what}={show(inner)}"
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Loss scaling goes outside: pass the optimizer within it, and put "
            "`LossScaleOptimizer` around what you make of that, as in "
            "`LossScaleOptimizer(DGCOptimizer(inner))`. "
            f"Received: {what}={show(inner)}"
        )
    if isinstance(inner, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ValueError(
            "`MultiOptimizer` cannot be wrapped: momentum, clipping and learning rate "
            "would have to be taken over from each of its optimizers. Pass one "
            "optimizer for all variables or, in a training loop of your own, use one "
            f"`DGCOptimizer` for each part of the model. Received: {what}={show(inner)}"
        )
    if inner.built:
        raise ValueError(
            f"`{what}` is already built, so its state would be lost. Pass a new "
            "optimizer with the same settings, for example "
            "`type(inner).from_config(inner.get_config())`. "
            f"Received: {what}={show(inner)} with {len(inner.variables)} variables"
        )
    inner_hyperparameters.check_settings(
        inner_hyperparameters.settings_of_optimizer(inner),
        steps_locally,
        is_outer=what == "outer",
    )
    momentum = getattr(inner, "momentum", 0.0)
    if not 0 <= momentum < 1:
        raise ValueError(
            f"The momentum of the {what} optimizer must be in [0, 1), else the "
            f"velocity grows without bound. Received: momentum={momentum}"
        )


def extract_hyperparameters(
    inner: keras.optimizers.Optimizer,
    momentum_correction: bool,
    adam_correction: bool = False,
    compressor: Compressor | None = None,
    rate_correction: bool = False,
) -> tuple[keras.optimizers.Optimizer, InnerHyperparameters]:
    """Copy `inner` without the settings that DGC applies itself.

    Momentum moves into the local correction, never into both; only the step of
    `keras.optimizers.SGD` allows it, so a subclass that overrides any part of a step
    keeps its momentum. Clipping and loss scaling act on the local gradient, before the
    residual; a class that clips in a way of its own does that to the sum. Gradients of
    several calls are accumulated before all of that.

    Args:
        inner: the user's optimizer; it is not changed.
        momentum_correction: whether to take the momentum of an SGD.
        adam_correction: whether to take momentum and second moment of an Adam.
        compressor: method by which entries wait, which takes the place of an Adam's
            momentum (`inner_hyperparameters.py`), but for that which a Nadam looks
            ahead of.
        rate_correction: whether to take the learning rate of an SGD, or of an Adam
            of which no momentum is left (`inner_hyperparameters.py`).

    Returns:
        The copy, which applies the update, and what was taken.

    Raises:
        ValueError: for an attribute that a copy cannot have.
    """
    changes: dict[str, Any] = dict.fromkeys(_OF_EVERY_CALL)
    if not keras_optimizers.clips_by_itself(inner):
        changes.update(dict.fromkeys(CLIPPING))
    if momentum_correction and _applies_as_sgd(inner) and inner.momentum:
        changes.update(momentum=0.0, nesterov=False)
    taken = {name: getattr(inner, name) for name in changes}
    rule = copy_optimizer(inner)
    for name, value in changes.items():
        setattr(rule, name, value)
    kind = adam_variants.find_adam_variant(inner) if adam_correction else None
    momentum = float(inner.beta_1) if kind else 0.0
    if kind and not kind.ahead and compressor:
        momentum = inner_hyperparameters.remaining_momentum(momentum, compressor.wait)
    hyperparameters = InnerHyperparameters(taken, kind, momentum)
    waits_instead = kind is not None and not hyperparameters.keeps_velocity
    if rate_correction and (_applies_as_sgd(inner) or waits_instead):
        hyperparameters = dataclasses.replace(hyperparameters, rate=True)
    if hyperparameters.scales_by_learning_rate:
        inner_hyperparameters.apply_without_learning_rate(rule)
    return rule, hyperparameters


def _applies_as_sgd(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a whole step is `SGD`'s own: nothing of it is overridden."""
    return keras_optimizers.behaves_as(optimizer, keras.optimizers.SGD)
