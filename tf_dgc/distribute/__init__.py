"""Distribute: a stock strategy made ready, its hook, and values that workers own.

May import `collectives`, `checkpoint`, `training` and `cluster`.
"""

__all__ = [
    "background",
    "communicator",
    "copies",
    "cross_device",
    "divergence",
    "elastic",
    "groups",
    "initial_values",
    "loss_scale",
    "near",
    "pieces",
    "preparation",
    "probes",
    "startup",
    "worker_variables",
]
