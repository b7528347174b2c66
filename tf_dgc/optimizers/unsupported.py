"""Which optimizers' rules train badly behind what is sent rarely or coarsely."""

import warnings

import keras

from tf_dgc._internals.keras_optimizers import behaves_as, overridden
from tf_dgc.arguments import show
from tf_dgc.compressors import ATOMO, Compressor, PowerSGD, Uniform8Bit
from tf_dgc.optimizers import adam_variants
from tf_dgc.optimizers.inner_optimizers import NovoGrad

# Why, of those whose rule is applied to the sum and is not linear in it. The one place
# for it; `study/inner.py` has the figures (docs/adam.md).
_SQUARES = (
    "divides by the root of a mean of squares, and of an entry that comes every T "
    "steps it remembers the square of all that waited, so that the variable moves "
    "T**0.5 times too little"
)
_NORMS = (
    "divides by a norm of each tensor, and that of a sum that has one in T entries, of "
    "all that waited, is T**0.5 times too large"
)
_FACTORS = (
    "divides by the root of mean squares of rows and columns, and those of a sum that "
    "has one in T entries, of all that waited, are T times too large, so that the "
    "variable moves T**0.5 times too little"
)
_SIGNS = (
    "moves by signs, which are those of zeros, and of momentum that fades, wherever "
    "nothing arrives"
)
_WHOLE = (
    "makes singular values of a momentum equal, and where most entries are left out "
    "they are not those of the gradient"
)
_REASONS = {
    "RMSprop": _SQUARES,
    "Adagrad": _SQUARES,
    "Adadelta": _SQUARES,
    "Adafactor": _FACTORS,
    "Ftrl": _SQUARES,
    "Lamb": _SQUARES,
    "ScheduleFreeAdamW": _SQUARES,
    "NovoGrad": _NORMS,
    "Lion": _SIGNS,
    "Muon": _WHOLE,
}
# Of these, what loses little more than an SGD with momentum does, at a rate of its own;
# and what loses much behind methods that send a little of all entries, too.
_AT_ANOTHER_RATE = ("Adagrad", "Adafactor", "Ftrl")
_BADLY_ANYWHERE = ("Lamb", "ScheduleFreeAdamW", "NovoGrad")
_SMALLEST = 1e-19  # whose square is above 0 in float32
_CORRECTED = ("AdamW", "Adam", "Adamax", "Nadam")


def unsupported_reason(inner: keras.optimizers.Optimizer) -> str | None:
    """Return why a rule suits no sum of what waited; None if it does, or is not known.

    Args:
        inner: any Keras optimizer.
    """
    name = _rule(inner)
    return _REASONS[name] if name else _reason_of_adams(inner)


def _rule(inner: keras.optimizers.Optimizer) -> str | None:
    """Return which of the rules it has, if any."""
    own = {"NovoGrad": NovoGrad}
    for name in _REASONS:
        # An older Keras lacks some.
        kind = own.get(name) or getattr(keras.optimizers, name, None)
        if kind is not None and behaves_as(inner, kind):
            return name
    return None


def _reason_of_adams(inner: keras.optimizers.Optimizer) -> str | None:
    """Return why what is derived from an Adam is not corrected; None if it is."""
    if adam_variants.find_adam_variant(inner) is not None:
        return None
    for name in _CORRECTED:
        kind = getattr(keras.optimizers, name)
        if isinstance(inner, kind):
            names = ", ".join(f"`{n}`" for n in overridden(inner, kind))
            return (
                f"it overrides {names}, so its rule is applied to the sum, where that "
                f"of `{name}` {_SQUARES}"
            )
    return None


def check_inner_rule(
    inner: keras.optimizers.Optimizer,
    compressor: Compressor,
    feedback: bool,
    wanted: bool,
) -> None:
    """Warn of a rule that trains badly behind a method, and say what to use.

    One that would make no numbers of the model is refused, whoever wants it.

    Args:
        inner: optimizer that applies the sums.
        compressor: method.
        feedback: whether what is not sent is kept back.
        wanted: whether the user asked for it, by `adam_correction=False`.

    Raises:
        ValueError: for an `Adafactor` as `check_numbers` does.
    """
    check_rule_numbers(inner, compressor, wanted)
    if wanted or not feedback or _sends_nearly_all(compressor):
        return
    name, why, how = (
        type(inner).__name__,
        unsupported_reason(inner),
        _how(inner, compressor),
    )
    if why is not None and how is not None:
        warnings.warn(
            f"`{name}` {how} behind {compressor!r}: {why}. Use `Adam`, `AdamW`, "
            "`Nadam` or `Adamax`, which divide before the exchange, or `SGD` with "
            "momentum; or, with this optimizer, a method that sends nearly everything "
            'in every step, such as "uniform_8bit". To train so anyway, pass '
            "`adam_correction=False`.",
            UserWarning,
            stacklevel=4,
        )


def check_outer_rule(
    outer: keras.optimizers.Optimizer, compressor: Compressor, feedback: bool
) -> None:
    """Warn of the same for an outer optimizer, to which no rule is corrected.

    Args:
        outer: optimizer that applies the mean of how far workers moved.
        compressor: method.
        feedback: whether what is not sent is kept back.

    Raises:
        ValueError: for an `Adafactor` as `check_numbers` does.
    """
    check_rule_numbers(outer, compressor)
    if not feedback or _sends_nearly_all(compressor):
        return
    name, how = type(outer).__name__, _how(outer, compressor)
    adam = any(isinstance(outer, getattr(keras.optimizers, n)) for n in _CORRECTED)
    why = _SQUARES if adam else unsupported_reason(outer)
    if why is not None and how is not None:
        warnings.warn(
            f"`{name}` as `outer` {how} behind {compressor!r}: {why}. Use `SGD`, "
            "with momentum or without, as DiLoCo does; or, with this optimizer, a "
            'method that sends nearly everything in every round, such as "none" or '
            '"uniform_8bit".',
            UserWarning,
            stacklevel=5,
        )


def _how(inner: keras.optimizers.Optimizer, compressor: Compressor) -> str | None:
    """Return how an unsuited rule trains behind a method; None if no worse than others.

    By what was measured with sparsification, signs and PowerSGD (docs/adam.md).
    """
    rule = _rule(inner)
    if rule is None:  # what is derived from an Adam
        return "trains badly"
    if isinstance(compressor, (ATOMO, PowerSGD)):
        return None
    coarse = compressor.kind == "quantization" and rule not in _BADLY_ANYWHERE
    if coarse or rule in _AT_ANOTHER_RATE:
        return "needs a learning rate of its own, to be searched anew,"
    return "trains badly"


def check_rule_numbers(
    inner: keras.optimizers.Optimizer, compressor: Compressor, wanted: bool = False
) -> None:
    """Refuse, or warn of, an `Adafactor` that makes NaN where there is no gradient.

    Args:
        inner: optimizer that applies the sums.
        compressor: method.
        wanted: whether the user asked for no warning.

    Raises:
        ValueError: behind a method that leaves entries out, so that rows and columns of
            a sum are empty nearly always.
    """
    factored = behaves_as(inner, keras.optimizers.Adafactor)
    if not factored or inner.epsilon_1 >= _SMALLEST:
        return
    why = (
        f"`Adafactor(epsilon_1={inner.epsilon_1:g})` makes NaN of a whole variable in "
        "which a row and a column have no gradient: it divides by the root of the "
        "product of their means, which is 0 in float32. {} Pass "
        "`Adafactor(epsilon_1=1e-15)`."
    )
    if compressor.kind == "sparsification":
        often = f"Behind {compressor!r}, which leaves entries out, that is nearly sure."
        raise ValueError(f"{why.format(often)} Received: inner={show(inner)}")
    if not wanted:
        data = "So may data have it, as embeddings, or pixels that are always 0."
        warnings.warn(why.format(data), UserWarning, stacklevel=5)


def _sends_nearly_all(compressor: Compressor) -> bool:
    """Whether what is kept back of an entry is small beside it."""
    return compressor.error_feedback == "optional" or type(compressor) is Uniform8Bit
