"""Take over: which settings of the inner optimizer DGC applies in its place."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tf_dgc import _internals
from tf_dgc.wrapper import OptimizerWrapper

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


@dataclasses.dataclass(frozen=True)
class TakeOver:
    """The settings taken over.

    Attributes:
        taken: config entries that were changed in the copy, with the values that the
            inner optimizer had; `get_config` gives them back.
    """

    taken: dict[str, Any]

    @property
    def momentum(self) -> float:
        """Coefficient of the momentum correction; 0 for error feedback only."""
        return self.taken.get("momentum", 0.0)

    @property
    def nesterov(self) -> bool:
        """Whether the correction is Nesterov's."""
        return self.taken.get("nesterov", False)

    @property
    def clipping(self) -> dict[str, float | None]:
        """Keyword arguments of `clipping.clip`."""
        return {name: self.taken[name] for name in _CLIPPING}

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by, or None."""
        return self.taken["loss_scale_factor"]


def check_inner(inner: Any) -> None:
    """Raise `ValueError` unless `inner` is an unbuilt Keras optimizer to be wrapped."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(
            "`inner` must be a Keras optimizer, for example "
            "`keras.optimizers.SGD(0.1, momentum=0.9)`. "
            f"Received: inner={inner!r} (of type {type(inner)})"
        )
    if isinstance(inner, OptimizerWrapper):
        raise ValueError(
            f"`inner` is itself a {type(inner).__name__}, and what is compressed once "
            "cannot be compressed again. Pass its own inner optimizer. "
            f"Received: inner={inner!r}"
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Loss scaling goes outside: use "
            "`LossScaleOptimizer(DGCOptimizer(inner))`, not "
            "`DGCOptimizer(LossScaleOptimizer(inner))`. "
            f"Received: inner={inner!r}"
        )
    if inner.built:
        raise ValueError(
            "`inner` is already built, so its state would be lost. Pass a new "
            "optimizer with the same settings, for example "
            "`type(inner).from_config(inner.get_config())`. "
            f"Received: inner={inner!r} with {len(inner.variables)} variables"
        )
    if inner.gradient_accumulation_steps:
        raise ValueError(
            "`gradient_accumulation_steps` is not supported: there is an exchange at "
            "every step, and what is not sent is accumulated. Use a larger batch or "
            "stronger compression instead. Received: "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}"
        )
    momentum = getattr(inner, "momentum", 0.0)
    if not 0 <= momentum < 1:
        raise ValueError(
            "The momentum of the inner optimizer must be in [0, 1), else the velocity "
            f"grows without bound. Received: momentum={momentum}"
        )


def take_over(
    inner: keras.optimizers.Optimizer, momentum_correction: bool
) -> tuple[keras.optimizers.Optimizer, TakeOver]:
    """Copy `inner` without the settings that DGC applies itself.

    Momentum moves into the local correction, never into both; only plain
    `keras.optimizers.SGD` has an update that allows it. Clipping and loss scaling act
    on the local gradient, before the residual.

    Args:
        inner: the user's optimizer; it is not changed.
        momentum_correction: whether to take the momentum of an SGD.

    Returns:
        The copy, which applies the update, and what was taken.
    """
    config = _internals.settings_of(inner)
    changes: dict[str, Any] = dict.fromkeys((*_CLIPPING, "loss_scale_factor"))
    if momentum_correction and _is_plain_sgd(inner) and inner.momentum:
        changes.update(momentum=0.0, nesterov=False)
    taken = {name: config[name] for name in changes}
    return _internals.copy_optimizer(inner, {**config, **changes}), TakeOver(taken)


def _is_plain_sgd(inner: keras.optimizers.Optimizer) -> bool:
    """Whether the update rule is SGD's own, not that of a subclass."""
    return type(inner).update_step is keras.optimizers.SGD.update_step


def is_plain_descent(
    rule: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> bool:
    """Whether `rule.apply` is `w -= learning_rate * gradient` and nothing else.

    Then entries whose gradient is zero need not be touched.
    """
    return (
        _is_plain_sgd(rule)
        and not rule.momentum
        and not rule.weight_decay
        and not rule.use_ema
        and all(v.constraint is None for v in variables)
        and all(v.dtype in {"float32", "float64"} for v in variables)
    )
