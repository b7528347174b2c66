"""Optimizers: Keras optimizers that exchange gradients by a compression method.

May import every room but `launch`, `cli` and `testing`.
"""

__all__ = [
    "adam",
    "agreement",
    "averaging",
    "choosing",
    "compressed",
    "configuration",
    "crossing",
    "dgc",
    "differing",
    "drift",
    "exclusions",
    "hints",
    "inner_state",
    "inputs",
    "kept",
    "local",
    "moving",
    "native_rules",
    "novograd",
    "overwriting",
    "presets",
    "probing",
    "rounds",
    "sampling",
    "settings",
    "shown",
    "takeover",
    "tensors",
    "updating",
    "validation",
    "wrapper",
]
