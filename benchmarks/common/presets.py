"""Optimizers of local steps, and what they are compared with, by name."""

import keras

import tf_dgc
from common import method_settings

LOCAL = {
    "local_sgd": tf_dgc.local_sgd,
    "diloco": tf_dgc.diloco,
    "sparse_loco": tf_dgc.sparse_loco,
}
"""Exchange every H steps."""
CONTROL = "dense adamw"
"""The dense run of `WITH_ADAMW`, by which their learning rate is chosen."""
WITH_ADAMW = (CONTROL, "diloco", "sparse_loco")
EVERY_STEP = ("dense", "dgc", "demo")
"""Exchange in every step."""
MODES = ["none", *EVERY_STEP, *LOCAL]


def optimizer(name, period):
    """Return the optimizer of a mode: `none`, of `EVERY_STEP`, or of `LOCAL`.

    Args:
        name: of the mode.
        period: steps from one exchange to the next, for those of `LOCAL`.
    """
    momentum = 0.0 if name in method_settings.ARE_MOMENTUM else 0.9
    sgd = keras.optimizers.SGD(1e-3, momentum=momentum)
    if name in LOCAL:
        inner = sgd if name == "local_sgd" else None  # the paper's
        return LOCAL[name](inner, period)
    if name in ("none", "dense"):
        return sgd
    return method_settings.method(name)[0](sgd, method_settings.NO_PHASES)
