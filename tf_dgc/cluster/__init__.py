"""Cluster: the processes that train together, their names, meetings and failures.

Nothing here is about gradients. May import `_internals`.
"""

__all__ = [
    "coordination",
    "failures",
    "meeting",
    "positions",
    "tf_config",
    "watch",
    "worker_interrupts",
    "workers",
]
