"""Transforms: what happens to a gradient before it is accumulated, and to momentum.

Clipping, correction and masking, on tensors alone. May import `_internals`.
"""

__all__ = [
    "clipping",
    "correction",
    "preconditioning",
]
