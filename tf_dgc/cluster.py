"""Cluster configurations from job schedulers."""

from tf_dgc.multiworker.slurm import from_slurm

__all__ = ["from_slurm"]
