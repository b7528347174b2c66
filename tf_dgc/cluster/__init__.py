"""Cluster: the processes that train together, their names, meetings and failures.

Nothing here is about gradients. May import `_internals`.
"""

from tf_dgc.cluster.slurm import from_slurm as from_slurm

__all__ = [
    "arriving",
    "coordination",
    "failures",
    "frames",
    "meeting",
    "positions",
    "slurm",
    "tf_config",
    "watch",
    "watchdog",
    "watchdog_process",
    "worker_interrupts",
    "workers",
]
