"""`Corrections`: how an optimizer corrects the update for delayed entries."""

import dataclasses

import keras

from tf_dgc import arguments
from tf_dgc.arguments import show
from tf_dgc.optimizers.config import FrozenSettings


@keras.saving.register_keras_serializable(package="tf_dgc")
@dataclasses.dataclass(frozen=True)
class Corrections(FrozenSettings):
    """How the update is corrected for entries that are sent some steps late.

    With error feedback an entry of the gradient waits in the residual `v` until it is
    sent. The paper is Lin et al., "Deep Gradient Compression", ICLR 2018.

    >>> corrections = tf_dgc.Corrections(factor_masking=True)
    >>> optimizer = tf_dgc.DGCOptimizer(sgd, corrections=corrections)

    Args:
        momentum: momentum correction (section 3.2). With the gradient g and the
            momentum m of an inner `SGD`, a worker accumulates its velocity,
            `u = m * u + g` and `v = v + u`, instead of `v = v + g`. If False, the
            momentum is applied to the sum over workers. None: True in `DGCOptimizer`;
            False in `CompressedOptimizer`; in `ServerOptimizer` True with error
            feedback and a lossy compressor. Needs error feedback. Does not affect an
            Adam.
        factor_masking: momentum factor masking (section 3.3), for methods that send
            some of the entries: whether to set u to 0 where entries were sent. None:
            only for an `SGD`, and only in steps with a sparsity of at least 99 %. The
            paper masks in the warm-up, too, where entries that are sent every few steps
            lose most of their momentum. A `Nadam` is never masked.
        adam: whether an inner `Adam`, `AdamW`, `Adamax` or `Nadam` divides the gradient
            by the root of its second moment, `v = v + g / (s**0.5 + epsilon)`, before
            the exchange, if there is error feedback. Without it, an entry that is sent
            every T steps moves `T**0.5` times too little. Other optimizers with this
            problem, such as `RMSprop`, cause a warning, unless this is False.
        scale_before_accumulation: whether the learning rate `r[t]` of its own step
            multiplies a gradient, `v = v + r[t] * g[t]` (Karimireddy et al., "Error
            feedback fixes SignSGD", ICML 2019, algorithm 2). If False, that of the step
            in which an entry is sent multiplies the sum, as in section 3. Applies with
            error feedback, to an `SGD` and to a corrected Adam whose momentum is
            replaced by the delay (with `beta_1=0.9` from a sparsity of 90 % on; never a
            `Nadam`), except with `Threshold`, `TwoBit` and `DeMo(sign=True)`.

    Raises:
        ValueError: for other values.
    """

    momentum: bool | None = None
    factor_masking: bool | None = None
    adam: bool = True
    scale_before_accumulation: bool = True

    def __post_init__(self) -> None:
        for name in ("momentum", "factor_masking"):
            value = arguments.check_choice(name, getattr(self, name))
            object.__setattr__(self, name, value)
        for name in ("adam", "scale_before_accumulation"):
            value = arguments.check_bool(name, getattr(self, name))
            object.__setattr__(self, name, value)


def check_corrections(corrections: Corrections) -> None:
    """Raise `ValueError` for anything else than `Corrections`."""
    if not isinstance(corrections, Corrections):
        raise ValueError(
            "`corrections` must be a `tf_dgc.Corrections`, for example "
            "`tf_dgc.Corrections(factor_masking=True)`. Received: "
            f"corrections={show(corrections)}"
        )
