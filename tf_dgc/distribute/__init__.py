"""Distribute: a stock strategy made ready, its hook, and values that workers own.

May import `collectives`, `checkpoint`, `training` and `cluster`.
"""

__all__ = [
    "communicator",
    "cross_device",
    "divergence",
    "elastic",
    "groups",
    "initial_values",
    "pieces",
    "preparation",
    "startup",
    "worker_variables",
]
