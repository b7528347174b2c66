"""Adaptive optimizers: the correction of an Adam, and what is not corrected.

May import `inner`, and rooms from `steps` down.
"""

__all__ = [
    "adam",
    "agreement",
    "beginning",
    "crossing",
    "refreshing",
    "sampling",
    "unsuited",
]
