"""Warns of inner optimizers whose rules train badly with compressed gradients.

The measurements are in `study/inner_optimizers.py` and docs/research/adam.md.
"""

import warnings
from typing import NamedTuple

import keras

from tf_dgc._internals.keras_optimizers import behaves_as, overridden
from tf_dgc.arguments import show
from tf_dgc.compressors import (
    ATOMO,
    Compressor,
    PowerSGD,
    Quantizer,
    Sparsifier,
    Uniform8Bit,
)
from tf_dgc.optimizers.adam_variants import find_adam_variant
from tf_dgc.optimizers.inner_optimizers import NovoGrad

# These rules are applied to the sum, and are not linear in it.
_SQUARES = (
    "divides by the root of a mean of squares. An entry that is sent every T steps is "
    "the sum of T gradients, whose square is so large that the variable moves T**0.5 "
    "times too little"
)
_NORMS = (
    "divides by a norm of each tensor. If one in T entries is sent, as the sum of T "
    "gradients, the norm is T**0.5 times too large"
)
_FACTORS = (
    "divides by the root of mean squares of rows and columns. If one in T entries is "
    "sent, as the sum of T gradients, these are T times too large, so that the "
    "variable moves T**0.5 times too little"
)
_SIGNS = (
    "moves by signs. Where no entry arrives, they are signs of zeros and of a decaying "
    "momentum"
)
_SINGULAR_VALUES = (
    "makes the singular values of a momentum equal, and with most entries left out "
    "they are not those of the gradient"
)


class _Rule(NamedTuple):
    """Why a rule is unsupported, and with which methods.

    Attributes:
        reason: effect of delayed entries on the rule, a verb phrase.
        needs_learning_rate: whether it trains nearly as well as an SGD with momentum,
            at another learning rate.
        quantization: whether it trains badly with quantization too.
    """

    reason: str
    needs_learning_rate: bool = False
    quantization: bool = False


_RULES = {
    "RMSprop": _Rule(_SQUARES),
    "Adagrad": _Rule(_SQUARES, needs_learning_rate=True),
    "Adadelta": _Rule(_SQUARES),
    "Adafactor": _Rule(_FACTORS, needs_learning_rate=True),
    "Ftrl": _Rule(_SQUARES, needs_learning_rate=True),
    "Lamb": _Rule(_SQUARES, quantization=True),
    "ScheduleFreeAdamW": _Rule(_SQUARES, quantization=True),
    "NovoGrad": _Rule(_NORMS, quantization=True),
    "Lion": _Rule(_SIGNS),
    "Muon": _Rule(_SINGULAR_VALUES),
}
_CORRECTED = ("AdamW", "Adam", "Adamax", "Nadam")
_MIN_EPSILON = 1e-19  # its square is above 0 in float32


def unsupported_reason(inner: keras.optimizers.Optimizer) -> str | None:
    """Return why a rule is unsupported with delayed entries; None for other rules."""
    rule = _unsupported_rule(inner)
    if rule:
        return rule.reason
    if find_adam_variant(inner) is not None:
        return None
    for name in _CORRECTED:
        kind = getattr(keras.optimizers, name)
        if isinstance(inner, kind):
            names = ", ".join(f"`{n}`" for n in overridden(inner, kind))
            return (
                f"overrides {names}, so its rule is applied to the sum, where that "
                f"of `{name}` {_SQUARES}"
            )
    return None


def check_inner_rule(
    inner: keras.optimizers.Optimizer,
    compressor: Compressor,
    error_feedback: bool,
    warn: bool,
) -> None:
    """Warn if the inner optimizer's rule is unsupported with a method.

    Users turn the warning off with `Corrections(adam=False)`.

    Raises:
        ValueError: see `check_rule_numbers`.
    """
    check_rule_numbers(inner, compressor, warn)
    if not warn or not error_feedback or _sends_nearly_all(compressor):
        return
    reason, effect = unsupported_reason(inner), _effect(inner, compressor)
    if reason is not None and effect is not None:
        warnings.warn(
            f"`{type(inner).__name__}` {effect} with {compressor!r}: it {reason}. Use "
            "`Adam`, `AdamW`, `Nadam` or `Adamax`, which divide before the exchange, "
            "or `SGD` with momentum; or, with this optimizer, a method that sends "
            'nearly everything in every step, such as "uniform_8bit". To train so '
            "anyway, pass `corrections=tf_dgc.Corrections(adam=False)`.",
            UserWarning,
            stacklevel=4,
        )


def check_outer_rule(
    outer: keras.optimizers.Optimizer, compressor: Compressor, error_feedback: bool
) -> None:
    """Warn if an outer optimizer's rule is unsupported; no Adam is corrected there.

    Raises:
        ValueError: see `check_rule_numbers`.
    """
    check_rule_numbers(outer, compressor)
    if not error_feedback or _sends_nearly_all(compressor):
        return
    is_adam = any(isinstance(outer, getattr(keras.optimizers, n)) for n in _CORRECTED)
    reason = _SQUARES if is_adam else unsupported_reason(outer)
    effect = _effect(outer, compressor)
    if reason is not None and effect is not None:
        warnings.warn(
            f"`{type(outer).__name__}` as `outer` {effect} with {compressor!r}: it "
            f"{reason}. Use `SGD`, with momentum or without, as DiLoCo does; or, with "
            "this optimizer, a method that sends nearly everything in every round, "
            'such as "none" or "uniform_8bit".',
            UserWarning,
            stacklevel=5,
        )


def check_rule_numbers(
    inner: keras.optimizers.Optimizer, compressor: Compressor, warn: bool = True
) -> None:
    """Warn of an `Adafactor` that computes NaN where there is no gradient.

    Raises:
        ValueError: with sparsification, where rows and columns without a gradient are
            nearly certain.
    """
    if not behaves_as(inner, keras.optimizers.Adafactor):
        return
    if inner.epsilon_1 >= _MIN_EPSILON:
        return
    problem = (
        f"`Adafactor(epsilon_1={inner.epsilon_1:g})` makes NaN of a whole variable in "
        "which a row and a column have no gradient: it divides by the root of the "
        "product of their means, which is 0 in float32."
    )
    advice = "Pass `Adafactor(epsilon_1=1e-15)`."
    if isinstance(compressor, Sparsifier):
        raise ValueError(
            f"{problem} {compressor!r} leaves entries out, so that is nearly certain. "
            f"{advice} Received: inner={show(inner)}"
        )
    if warn:
        warnings.warn(
            f"{problem} Embeddings, or pixels that are always 0, cause that. {advice}",
            UserWarning,
            stacklevel=5,
        )


def _unsupported_rule(inner: keras.optimizers.Optimizer) -> _Rule | None:
    for name, rule in _RULES.items():
        # Older versions of Keras lack some.
        kind = NovoGrad if name == "NovoGrad" else getattr(keras.optimizers, name, None)
        if kind is not None and behaves_as(inner, kind):
            return rule
    return None


def _effect(inner: keras.optimizers.Optimizer, compressor: Compressor) -> str | None:
    """Return how an unsupported rule trains with a method; None if it trains well."""
    rule = _unsupported_rule(inner)
    if rule is None:  # a subclass of an Adam
        return "trains badly"
    if isinstance(compressor, (ATOMO, PowerSGD)):
        return None
    trains_with_quantization = (
        isinstance(compressor, Quantizer) and not rule.quantization
    )
    if rule.needs_learning_rate or trains_with_quantization:
        return "needs a learning rate of its own, to be searched anew,"
    return "trains badly"


def _sends_nearly_all(compressor: Compressor) -> bool:
    """Whether the residual of an entry is small compared to the entry."""
    return compressor.error_feedback == "optional" or type(compressor) is Uniform8Bit
