"""What is taken over of the inner optimizer, to be applied in its place."""

import dataclasses
from typing import Any

from tf_dgc.inner.adam_kinds import Kind
from tf_dgc.inner.settings import CLIPPING


@dataclasses.dataclass(frozen=True)
class TakeOver:
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
    adam: Kind | None = None
    adam_momentum: float = 0.0
    rate: bool = False

    @property
    def momentum(self) -> float:
        """Coefficient of the momentum correction; 0 for error feedback only."""
        return self.taken.get("momentum", self.adam_momentum)

    @property
    def weighs(self) -> bool:
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
