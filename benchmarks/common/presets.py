"""Optimizers by name: local steps, and methods to compare them with."""

import keras

import tf_dgc
from common import method_settings

LOCAL = {
    "local_sgd": tf_dgc.local_sgd,
    "diloco": tf_dgc.diloco,
    "sparse_loco": tf_dgc.sparse_loco,
}
"""Modes that exchange every H steps."""
CONTROL = "dense adamw"
"""The dense run whose learning rate the runs of `WITH_ADAMW` use."""
WITH_ADAMW = (CONTROL, "diloco", "sparse_loco")
EVERY_STEP = ("dense", "dgc", "demo")
"""Modes that exchange in every step."""
MODES = ["none", *EVERY_STEP, *LOCAL]


def create_optimizer(name, period):
    """Return the optimizer of a mode: "none", or one of `EVERY_STEP` or `LOCAL`.

    Args:
        name: name of the mode.
        period: steps from one exchange to the next, for modes of `LOCAL`.
    """
    momentum = 0.0 if name in method_settings.NO_INNER_MOMENTUM else 0.9
    sgd = keras.optimizers.SGD(1e-3, momentum=momentum)
    if name in LOCAL:
        inner = sgd if name == "local_sgd" else None  # None is the paper's
        return LOCAL[name](inner, period)
    if name in ("none", "dense"):
        return sgd
    return method_settings.create_method(name)[0](sgd, method_settings.NO_PHASES)
