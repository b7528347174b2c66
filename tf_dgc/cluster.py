"""Cluster configurations from job schedulers; see `tf_dgc.multiworker.slurm`."""

from tf_dgc.multiworker.slurm import from_slurm

__all__ = ["from_slurm"]
