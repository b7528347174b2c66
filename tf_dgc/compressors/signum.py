"""Signum: signs of the momentum, decided by majority."""

from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number
from tf_dgc.collectives.requests import Aggregation
from tf_dgc.compressors.base import NativeMethod, StateSpec
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.signsgd import SignSGD


@keras.saving.register_keras_serializable(package="tf_dgc")
class Signum(SignSGD):
    """Takes a majority vote on the sign of the momentum: 1 bit per entry.

    Bernstein et al., algorithm 2 with the vote of algorithm 3:
    `m = beta m + (1 - beta) g` on every worker, and the update is
    `sign(sum of sign(m))`. The momentum is this method's state, per worker; the inner
    optimizer should have none. As with `SignSGD`, a row that never had a gradient does
    not change; one that had a gradient continues with its momentum.

    Args:
        momentum: coefficient beta, in [0, 1). The default is that of the paper's
            experiments; 0 is `SignSGD`.
    """

    name = "signum"
    reference = "Bernstein et al., signSGD, ICML 2018"

    def __init__(self, momentum: float = 0.9):
        self.momentum = check_number("momentum", momentum, "[0, 1)", "; 0 is `SignSGD`")

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return this worker's momentum."""
        return {"momentum": StateSpec(shape)}

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Update the momentum, and vote with its sign."""
        beta = self.momentum
        momentum = beta * state["momentum"] + (1 - beta) * values
        result = yield from super().aggregate(momentum, {}, keys)
        return result._replace(state={"momentum": momentum})

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method."""
        parameters = [*super().native(shape).parameters, self.momentum]
        return NativeMethod(self.name, [*parameters, 1 - self.momentum], ["momentum"])

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"momentum": self.momentum}
