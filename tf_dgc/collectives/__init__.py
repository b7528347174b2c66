"""Collectives: what a step asks for, and many tensors' requests as a few.

Knows neither methods nor strategies. May import `codecs` and what that may.
"""

__all__ = [
    "entries",
    "groups",
    "lockstep",
    "owning",
    "owning_operations",
    "packs",
    "regions",
    "requests",
    "rounds",
    "space",
]
