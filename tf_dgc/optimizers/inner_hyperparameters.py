"""Settings that every Keras optimizer has: what they may be, and who owns them."""

import dataclasses
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeAlias

import keras
import numpy as np

from tf_dgc import schedules
from tf_dgc._internals import keras_optimizers
from tf_dgc._internals.optimizer_copies import NameReference
from tf_dgc.arguments import show
from tf_dgc.optimizers.adam_variants import AdamVariant

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
SHARED_SETTINGS = (
    *CLIPPING,
    "weight_decay",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


def settings_of_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer, by name."""
    return {name: getattr(optimizer, name) for name in SHARED_SETTINGS}


def check_settings(
    settings: Mapping[str, Any], steps_locally: bool = False, is_outer: bool = False
) -> None:
    """Raise `ValueError` for settings that cannot be trained with.

    Args:
        settings: values by name, all of `NAMES`.
        steps_locally: whether they are of an optimizer whose steps meet nobody.
        is_outer: whether they are of one that takes a step per round.
    """
    _check_clipping(settings)
    _check_averages(settings)
    scale = settings["loss_scale_factor"]
    if scale is not None and not (_is_finite(scale) and scale > 0):
        raise ValueError(
            "`loss_scale_factor` must be None or a finite number above 0. "
            f"Received: loss_scale_factor={show(scale)}"
        )
    if steps_locally and settings["use_ema"]:
        raise ValueError(
            "`use_ema` of the inner optimizer would average weights that differ "
            "between workers. Let the outer optimizer average what they agree on: "
            "`outer=keras.optimizers.SGD(1.0, use_ema=True)`. Received: use_ema=True"
        )
    number = settings["gradient_accumulation_steps"]
    if number and not (isinstance(number, numbers.Integral) and int(number) >= 2):
        raise ValueError(
            "`gradient_accumulation_steps` must be None or a whole number of calls, 2 "
            f"or more. Received: gradient_accumulation_steps={show(number)}"
        )
    if scale is not None and is_outer:
        raise ValueError(
            "The outer optimizer is given how far the workers moved, which no loss "
            "scale multiplies, so there is nothing to divide by. Pass it to the inner "
            f"optimizer. Received: loss_scale_factor={show(scale)}"
        )
    if number and is_outer:
        raise ValueError(
            "The outer optimizer takes one step per round, so there is nothing to "
            "accumulate: make the period longer, or let the inner optimizer "
            f"accumulate. Received: gradient_accumulation_steps={number}"
        )


def check_setting_change(
    optimizer: keras.optimizers.Optimizer, name: str, value: Any, steps_locally: bool
) -> None:
    """Raise `ValueError` if a setting cannot be changed, or not to this value.

    Args:
        optimizer: optimizer whose setting it is.
        name: name of the setting, one of `NAMES`.
        value: value that it is to have.
        steps_locally: whether a step of it meets nobody.
    """
    check_settings({**settings_of_optimizer(optimizer), name: value}, steps_locally)
    if name == "gradient_accumulation_steps" and optimizer.built:
        raise ValueError(
            "`gradient_accumulation_steps` cannot be changed any more: what is "
            "accumulated is made when the optimizer is built. Pass it to the inner "
            f"optimizer. Received: gradient_accumulation_steps={show(value)}"
        )
    if name == "use_ema" and optimizer.built and bool(value) != bool(optimizer.use_ema):
        raise ValueError(
            "`use_ema` cannot be changed any more: the averages are made when the "
            "optimizer is built. Pass it to the inner optimizer, for example "
            f"`SGD(0.1, use_ema=True)`. Received: use_ema={show(value)}"
        )


def check_attribute(optimizer: Any, name: str, value: Any, fixed: Set[str]) -> None:
    """Raise `AttributeError` where setting an attribute would change nothing.

    Args:
        optimizer: wrapper whose attribute it is.
        name: name of the attribute.
        value: value that it is to have.
        fixed: names of what it is made with, and set once.
    """
    kind, own = type(optimizer).__name__, vars(optimizer)
    if name.startswith("_"):
        return
    if name in fixed and name in own:
        raise AttributeError(
            f"`{name}` cannot be changed any more: this {kind} is made with it, and so "
            "is what its workers have compared and what is saved. Make another one: "
            f"`{kind}(..., {name}=...)`. Received: {name}={show(value)}, and it is "
            f"{show(own[name])}"
        )
    known = name in own or name in fixed or hasattr(type(optimizer), name)
    inner = own.get("inner_optimizer")
    if not known and inner and name in inspect.signature(type(inner)).parameters:
        raise AttributeError(
            f"`{name}` is a setting of the inner optimizer, of which this {kind} was "
            "made. Make another one, of an inner optimizer as it is to be. "
            f"Received: {name}={show(value)}"
        )
    if not known and inner and hasattr(inner, name):
        raise AttributeError(
            f"`{name}` is an attribute of the inner optimizer, which this {kind} does "
            f"not read. Set it there: `optimizer.inner_optimizer.{name} = ...`. "
            f"Received: {name}={value!r}"
        )


def check_reference(optimizer: Any, reference: NameReference) -> None:
    """Raise `ValueError` if a function reads an optimizer that takes no steps.

    Args:
        optimizer: wrapper.
        reference: reference of a function of its inner optimizer.
    """
    if reference.holds:
        raise ValueError(
            f"The function `{reference.attribute}` of the inner optimizer reads the "
            f"global name {reference.name!r}, which stands for the optimizer that was "
            f"passed to {type(optimizer).__name__}. That is copied, and only the copy "
            "takes steps. Read `optimizer.iterations` and the like of the "
            f"{type(optimizer).__name__}, give it that name, or pass a "
            "`keras.optimizers.schedules.LearningRateSchedule`, which is called with "
            f"the iterations. Received: {reference.function.__qualname__!r} of "
            f"{reference.function.__module__}"
        )


def _check_clipping(settings: Mapping[str, Any]) -> None:
    given = {n: settings[n] for n in CLIPPING if settings[n] is not None}
    received = ", ".join(f"{name}={show(value)}" for name, value in given.items())
    if not all(_is_finite(value) and value >= 0 for value in given.values()):
        raise ValueError(
            "A clipping threshold must be a finite number above 0; None (or 0) for no "
            f"clipping. Received: {received}"
        )
    if len(given) > 1:
        raise ValueError(
            "Only one of `clipnorm`, `global_clipnorm` and `clipvalue` can be set. "
            f"Set the others to None first. Received: {received}"
        )


def _check_averages(settings: Mapping[str, Any]) -> None:
    momentum, every = settings["ema_momentum"], settings["ema_overwrite_frequency"]
    if not (_is_finite(momentum) and 0 <= momentum <= 1):
        raise ValueError(
            "`ema_momentum` must be a number in [0, 1]. "
            f"Received: ema_momentum={show(momentum)}"
        )
    if every and not (isinstance(every, int) and every >= 1):
        raise ValueError(
            "`ema_overwrite_frequency` must be None or a whole number of steps, 1 or "
            f"more. Received: ema_overwrite_frequency={show(every)}"
        )


def _is_finite(value: Any) -> bool:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and math.isfinite(value)


def describe_constructor(kind: type, values: Mapping[str, Any], *first: str) -> str:
    """Return a call of the constructor: arguments that are not its defaults.

    Args:
        kind: class of the optimizer.
        values: values of arguments by name, and of anything else.
        first: arguments that are given in any case, as they are to be shown.
    """
    parameters = inspect.signature(kind).parameters
    given = {n: values[n] for n in parameters if n != "name" and n in values}
    given = {n: v for n, v in given.items() if not _equal(v, parameters[n].default)}
    arguments = [*first, *(f"{name}={_short(v)}" for name, v in given.items())]
    return f"{kind.__name__}({', '.join(arguments)})"


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(np.all(value == default))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return f"{type(value).__name__}(...)"
    return show(value)


def delegated_setting(name: str) -> Any:
    """Return an attribute of a wrapper that belongs to its inner optimizer.

    Args:
        name: name of the setting.
    """

    def read(wrapper: Any) -> Any:
        return wrapper.read_setting(name)

    def change(wrapper: Any, value: Any) -> None:
        # Keras's constructor gives a wrapper settings, before there is an inner one.
        if hasattr(wrapper, "inner_optimizer"):
            wrapper.change_setting(name, value)

    return property(
        read, change, doc=f"`{name}` of the inner optimizer, or taken over from it."
    )


# --- Descriptions of optimizers, and of what they hold, that need no config.
#
# What trains in Keras need not have a config, which Keras requires only where it saves.

Serialize: TypeAlias = Callable[[Any], Any]


def describe(value: Any) -> Any:
    """Return what Keras serializes a value to; its class, if it has no config.

    Of an optimizer it is the class and the arguments, of a learning-rate schedule the
    class and a checksum of its operations. A lambda is described without a warning.

    Args:
        value: argument of an optimizer, or an optimizer.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return keras.saving.serialize_keras_object(value)
    except Exception:  # whatever a user's class raises
        return {"class_name": type(value).__qualname__, "config": _config(value)}


def _config(value: Any) -> dict[str, Any]:
    if isinstance(value, keras.optimizers.Optimizer):
        arguments = keras_optimizers.arguments_of(value)
        return {name: describe(held) for name, held in arguments.items()}
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return {"checksum of its operations": schedules.schedule_fingerprint(value)}
    return {}


# --- What is taken over of the inner optimizer, to be applied in its place.


@dataclasses.dataclass(frozen=True)
class InnerHyperparameters:
    """The settings taken over.

    Attributes:
        taken: config entries that were changed in the copy, with the values that the
            inner optimizer had, or that the user has set since; `get_config` gives them
            back.
        adam: kind of Adam that what is divided by is taken over from too; else None.
        adam_momentum: coefficient of the momentum that is left of its own then, else 0.
        rate: whether gradients are multiplied by the learning rate before they wait,
            and sums are applied as they are.
    """

    taken: dict[str, Any]
    adam: AdamVariant | None = None
    adam_momentum: float = 0.0
    rate: bool = False

    @property
    def momentum(self) -> float:
        """Coefficient of the momentum correction; 0 for error feedback only."""
        return self.taken.get("momentum", self.adam_momentum)

    @property
    def scales_by_learning_rate(self) -> bool:
        """Whether that is done to all gradients; of an Adam, to what is divided."""
        return self.rate and self.adam is None

    @property
    def keeps_velocity(self) -> bool:
        """Whether there is a velocity: a Nadam looks ahead of one without momentum."""
        return bool(self.momentum) or (self.adam is not None and self.adam.ahead)

    @property
    def nesterov(self) -> bool:
        """Whether the correction is Nesterov's."""
        return self.taken.get("nesterov", False)

    @property
    def calls(self) -> int:
        """Number of calls whose gradients make a step."""
        return self.taken.get("gradient_accumulation_steps") or 1

    @property
    def clipping(self) -> dict[str, float | None]:
        """Keyword arguments of `clipping.clip`."""
        return {name: self.taken.get(name) for name in CLIPPING}


# --- Rate correction: a gradient that waits counts by the learning rate of its own
# step.
#
# Keras's SGD has the learning rate within its momentum: `m = momentum * m - rate * g`.
# So does error feedback as it was analysed first (Karimireddy et al., "Error feedback
# fixes SignSGD", ICML 2019, algorithm 2: `p = rate * g + e`). Where the rate multiplies
# the sum instead, as in Lin et al., ICLR 2018, an entry that waited while the rate fell
# counts for less than in training that sends everything.
#
# Keras's Adam has the rate outside of its momentum. Where waiting has taken the place
# of
# the momentum (`inner_hyperparameters.py`) there is no such difference, and it has it
# inside too; else
# what waits does not wait for long, and the rate stays outside.


def apply_without_learning_rate(optimizer: Any) -> None:
    """Let an SGD take sums that have the learning rate in them already.

    Args:
        optimizer: inner optimizer, whose step is `SGD`'s own; the decay of weights goes
            on by its learning rate.
    """

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        del learning_rate
        type(optimizer).update_step(optimizer, gradient, variable, 1.0)

    keras_optimizers.replace_update_step(optimizer, update_step)


# --- Waiting takes the place of momentum, where gradients are divided before they wait.
#
# A momentum of coefficient b delays gradients by b / (1 - b) steps on average. What is
# not sent at once is delayed too: where one entry in n is sent, by n - 1 steps. Both
# average gradients, and both together are too late. Mitliagkas et al., "Asynchrony
# begets
# momentum", 2016, found that of asynchronous workers.


def remaining_momentum(beta: float, wait: float) -> float:
    """Return the momentum by which all is as late as by one of `beta` without waiting.

    Args:
        beta: coefficient of the momentum, in [0, 1).
        wait: steps that an entry waits for on average.

    Returns:
        Coefficient in [0, beta]; 0 if waiting alone is as late.
    """
    left = max(0.0, beta / (1.0 - beta) - wait)
    return left / (1.0 + left)
