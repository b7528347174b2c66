"""`StalenessCorrection`: how a server corrects pushes computed with old weights."""

import dataclasses

import keras

from tf_dgc import arguments
from tf_dgc.arguments import show
from tf_dgc.optimizers.config import FrozenSettings


@keras.saving.register_keras_serializable(package="tf_dgc")
@dataclasses.dataclass(frozen=True)
class StalenessCorrection(FrozenSettings):
    """How a server corrects pushes that were computed with old weights.

    Args:
        rule: "rate" divides the learning rate of a push by the number of updates since
            its weights (Zhang et al., "Staleness-aware Async-SGD", IJCAI 2016). "delay"
            estimates the change of the gradient since then, `g + lambda * g * g *
            (weights now - weights then)` (DC-ASGD, Zheng et al., ICML 2017, section
            3), for which the server stores a copy of the model per worker.
        strength: lambda of "delay", above 0; None for 0.04.

    Raises:
        ValueError: for other values, and for a strength with "rate".
    """

    rule: str
    strength: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in ("rate", "delay"):
            raise ValueError(
                f'`rule` must be "rate" or "delay". Received: rule={show(self.rule)}'
            )
        if self.strength is None:
            return
        if self.rule != "delay":
            raise ValueError(
                '`strength` is for `rule="delay"`. Received: '
                f"rule={show(self.rule)}, strength={show(self.strength)}"
            )
        strength = arguments.check_number("strength", self.strength, "(0, inf)")
        object.__setattr__(self, "strength", strength)
