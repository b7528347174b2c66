"""Steps: one worker's way from gradients to what is sent, and from replies to sums.

May import everything below `optimizers` but knows nothing of Keras optimizers.
"""

__all__ = [
    "accumulation",
    "base",
    "composed",
    "fused",
    "kinds",
    "memory",
    "native",
    "operations",
    "plan",
    "settling",
    "views",
]
