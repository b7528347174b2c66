"""The inner optimizer's hyperparameters: which the wrapper applies, and checks."""

import dataclasses
import inspect
import numbers
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np

from tf_dgc import schedules
from tf_dgc._internals import keras_optimizers
from tf_dgc.arguments import check_number, show
from tf_dgc.optimizers.adam_variants import AdamVariant

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
# Settings that every Keras optimizer has, apart from the learning rate.
SHARED_SETTINGS = (
    *CLIPPING,
    "weight_decay",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


@dataclasses.dataclass(frozen=True)
class InnerHyperparameters:
    """Hyperparameters that the wrapper applies instead of the inner optimizer.

    Attributes:
        values: their values by name, as the user set them. The copy of the inner
            optimizer has neutral values instead; the config has these.
        adam: variant of Adam whose second moment the wrapper applies; None for others.
        adam_momentum: coefficient of the momentum that the wrapper applies for `adam`.
        scale_before_accumulation: whether the learning rate of its own step multiplies
            a gradient before it is accumulated (with `adam`: the preconditioned
            gradient). The update then applies the sum without a learning rate.
    """

    values: dict[str, Any]
    adam: AdamVariant | None = None
    adam_momentum: float = 0.0
    scale_before_accumulation: bool = False

    @property
    def momentum(self) -> float:
        """Coefficient of the momentum correction; 0 for error feedback only."""
        return float(self.values.get("momentum", self.adam_momentum))

    @property
    def scales_by_learning_rate(self) -> bool:
        """Whether gradients are multiplied by the learning rate.

        Not with `adam`: `AdamCorrection` scales the preconditioned gradients instead.
        """
        return self.scale_before_accumulation and self.adam is None

    @property
    def keeps_velocity(self) -> bool:
        """Whether there is a velocity; Nadam needs one even with a momentum of 0."""
        return bool(self.momentum) or (self.adam is not None and self.adam.nesterov)

    @property
    def nesterov(self) -> bool:
        """Whether the momentum correction is Nesterov's."""
        return bool(self.values.get("nesterov", False))

    @property
    def accumulation_steps(self) -> int:
        """Number of calls of `apply` that form one step."""
        return self.values.get("gradient_accumulation_steps") or 1

    @property
    def loss_scale(self) -> float | None:
        """Factor of the loss, which the gradients are divided by; None without."""
        return self.values.get("loss_scale_factor")

    @property
    def clipping(self) -> dict[str, float | None]:
        """Keyword arguments of `clipping.clip_gradients`."""
        return {name: self.values.get(name) for name in CLIPPING}


def remaining_momentum(beta: float, delay: float) -> float:
    """Return the momentum that delayed sending does not already provide.

    A momentum of coefficient b delays gradients by b / (1 - b) steps on average, and
    sending one entry in n delays them by n - 1 steps. Both average gradients, and
    together they delay too much (Mitliagkas et al., "Asynchrony begets momentum", 2016,
    for asynchronous workers). The returned coefficient makes the total delay that of
    `beta` without delayed sending.

    Args:
        beta: coefficient of the momentum, in [0, 1).
        delay: average number of steps until an entry is sent.

    Returns:
        Coefficient in [0, beta].
    """
    remaining_delay = max(0.0, beta / (1.0 - beta) - delay)
    return remaining_delay / (1.0 + remaining_delay)


def apply_without_learning_rate(optimizer: keras.optimizers.Optimizer) -> None:
    """Let an SGD apply sums that include the learning rate.

    Then the residual accumulates `learning_rate[t] * gradient[t]`, as
    in Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019, algorithm 2, and
    in the momentum of Keras's SGD. Without it, as in Lin et al., the learning rate of
    the step in which an entry is sent multiplies the sum, so entries that were delayed
    while the rate fell count less than in uncompressed training.

    Keras's Adam applies the learning rate outside of its momentum. So an Adam has rate
    correction only where delayed sending has replaced the momentum; otherwise entries
    are not delayed for long.

    Weight decay still uses the learning rate.
    """

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        del learning_rate
        type(optimizer).update_step(optimizer, gradient, variable, 1.0)

    keras_optimizers.replace_update_step(optimizer, update_step)


# Settings that all optimizers have


def settings_of_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return an optimizer's `SHARED_SETTINGS` by name."""
    return {name: getattr(optimizer, name) for name in SHARED_SETTINGS}


def check_settings(
    settings: Mapping[str, Any], steps_locally: bool = False, is_outer: bool = False
) -> None:
    """Raise `ValueError` for `SHARED_SETTINGS` that cannot train.

    Keras's constructor checks some of them, but nothing that is set later.
    """
    _check_clipping(settings)
    check_number("ema_momentum", settings["ema_momentum"], "[0, 1]")
    frequency = settings["ema_overwrite_frequency"]
    if frequency and not (isinstance(frequency, int) and frequency >= 1):
        raise ValueError(
            "`ema_overwrite_frequency` must be None or a whole number of steps, 1 or "
            f"more. Received: ema_overwrite_frequency={show(frequency)}"
        )
    if steps_locally and settings["use_ema"]:
        raise ValueError(
            "`use_ema` of the inner optimizer would average weights that differ "
            "between workers. Let the outer optimizer average the anchor: "
            "`outer=keras.optimizers.SGD(1.0, use_ema=True)`. Received: use_ema=True"
        )
    loss_scale = settings["loss_scale_factor"]
    if loss_scale is not None:
        check_number("loss_scale_factor", loss_scale, "(0, inf)", ", or None")
    if loss_scale is not None and is_outer:
        raise ValueError(
            "The outer optimizer receives parameter deltas, which no loss scale "
            "multiplies, so there is nothing to divide by. Pass `loss_scale_factor` to "
            f"the inner optimizer. Received: loss_scale_factor={show(loss_scale)}"
        )
    calls = settings["gradient_accumulation_steps"]
    if calls and not (isinstance(calls, numbers.Integral) and int(calls) >= 2):
        raise ValueError(
            "`gradient_accumulation_steps` must be None or a whole number of calls, 2 "
            f"or more. Received: gradient_accumulation_steps={show(calls)}"
        )
    if calls and is_outer:
        raise ValueError(
            "The outer optimizer takes one step per round, so it has nothing to "
            "accumulate. Increase `period`, or let the inner optimizer accumulate. "
            f"Received: gradient_accumulation_steps={calls}"
        )


def _check_clipping(settings: Mapping[str, Any]) -> None:
    thresholds = {n: settings[n] for n in CLIPPING if settings[n] is not None}
    for name, value in thresholds.items():
        means = ", as a clipping threshold; None (or 0) for no clipping"
        check_number(name, value, "[0, inf)", means)
    if len(thresholds) > 1:
        received = ", ".join(f"{name}={show(v)}" for name, v in thresholds.items())
        raise ValueError(
            "Only one of `clipnorm`, `global_clipnorm` and `clipvalue` can be set. "
            f"Set the others to None first. Received: {received}"
        )


# Descriptions of optimizers. Keras requires a config only for saving, so an optimizer
# or one of its arguments may have none.

Serialize: TypeAlias = Callable[[Any], Any]


def describe(value: Any) -> Any:
    """Serialize a value as Keras does; if it has no config, by its class.

    An optimizer without a config is described by its class and arguments, a
    learning-rate schedule by its class and a checksum of its operations. A lambda is
    described without Keras's warning.
    """
    config: dict[str, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return keras.saving.serialize_keras_object(value)
    except Exception:  # whatever a user's class raises
        pass
    if isinstance(value, keras.optimizers.Optimizer):
        arguments = keras_optimizers.arguments_of(value)
        config = {name: describe(argument) for name, argument in arguments.items()}
    elif isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        fingerprint = schedules.schedule_fingerprint(value)
        config = {"checksum of its operations": fingerprint}
    return {"class_name": type(value).__qualname__, "config": config}


def describe_constructor(
    optimizer_class: type, values: Mapping[str, Any], *first: str
) -> str:
    """Return a constructor call with the arguments that differ from the defaults.

    The text of some arguments comes first; `values` has others by name.
    """
    arguments = list(first)
    for name, parameter in inspect.signature(optimizer_class).parameters.items():
        if name == "name" or name not in values:
            continue
        value = values[name]
        if not _equal(value, parameter.default):
            arguments.append(f"{name}={_short(value)}")
    return f"{optimizer_class.__name__}({', '.join(arguments)})"


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(np.all(value == default))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return f"{type(value).__name__}(...)"
    return show(value)
