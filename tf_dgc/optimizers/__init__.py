"""Optimizers: Keras optimizers that exchange the gradients of every step, compressed.

May import `adaptive`, `inner`, and rooms from `steps` down.
"""

__all__ = [
    "accumulating",
    "bucketing",
    "choosing",
    "compressed",
    "configuration",
    "dgc",
    "exclusions",
    "hints",
    "horizon",
    "inputs",
    "kept",
    "matching",
    "overlapping",
    "overwriting",
    "probing",
    "stepping",
    "tensors",
    "validation",
]
