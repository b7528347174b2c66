"""Tasks: what `TF_CONFIG` says of a cluster with a parameter server."""

import dataclasses
import os

import tensorflow as tf

from tf_dgc.cluster import tf_config


@dataclasses.dataclass(frozen=True)
class Task:
    """A process's place in a cluster with a server.

    Attributes:
        server: address of the server.
        num_workers: number of workers, N.
        worker: index of this worker; None for the server.
    """

    server: str
    num_workers: int
    worker: int | None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        host = self.server.rpartition(":")[0]
        return host in ("localhost", "[::1]") or host.startswith("127.")


def is_cluster() -> bool:
    """Whether `TF_CONFIG` names a server."""
    return '"ps"' in os.environ.get("TF_CONFIG", "")


def find() -> Task:
    """Return this process's task.

    Raises:
        ValueError: if `TF_CONFIG` cannot be read, or names no server, or several.
    """
    tf_config.check_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    jobs = {job: cluster.num_tasks(job) for job in cluster.jobs}
    if jobs.get("ps", 0) != 1:
        raise ValueError(
            "There must be one server, a task of type `ps` in the cluster of the "
            "environment variable TF_CONFIG, which `tf-dgc run --servers 1 --workers "
            f"N` sets for you. Received: {jobs.get('ps', 0)} tasks of type `ps`, in a "
            f"cluster of {cluster.as_dict()}"
        )
    job, index = resolver.task_type, int(resolver.task_id or 0)
    number = jobs.get("chief", 0) + jobs.get("worker", 0)
    if not number or job not in ("ps", "chief", "worker"):
        raise ValueError(
            "In a cluster with a server, tasks are of type `ps`, `worker` or `chief`, "
            f"and one at least is not the server. Received: task {job} {index}, in a "
            f"cluster of {cluster.as_dict()}"
        )
    server = cluster.task_address("ps", 0)
    if job == "ps":
        return Task(server, number, None)
    return Task(server, number, index + jobs.get("chief", 0) * (job == "worker"))
