"""Optimizers: Keras optimizers that exchange gradients by a compression method.

May import every room but `launch`, `cli` and `testing`.
"""

__all__ = [
    "adam",
    "agreement",
    "choosing",
    "compressed",
    "configuration",
    "crossing",
    "dgc",
    "exclusions",
    "hints",
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
    "takeover",
    "tensors",
    "updating",
    "validation",
    "wrapper",
]
