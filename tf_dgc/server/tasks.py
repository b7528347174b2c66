"""A process's task in a `TF_CONFIG` cluster with parameter servers."""

import dataclasses
import os

import tensorflow as tf

from tf_dgc.multiworker import tf_config


@dataclasses.dataclass(frozen=True)
class Task:
    """A process's task in a cluster with servers."""

    servers: tuple[str, ...]
    num_workers: int
    worker: int | None  # index of this worker; None for a server
    index: int = 0  # index of the server that this process is or communicates with

    @property
    def server(self) -> str:
        """Address of the server."""
        return self.servers[self.index]

    @property
    def shard(self) -> tuple[int, int]:
        """Index of the server and number of servers."""
        return self.index, len(self.servers)

    def for_server(self, index: int) -> "Task":
        """Return this worker's task for communicating with another server."""
        return dataclasses.replace(self, index=index)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        host = self.server.rpartition(":")[0]
        return host in ("localhost", "[::1]") or host.startswith("127.")


def is_cluster() -> bool:
    """Whether `TF_CONFIG` names a server."""
    return '"ps"' in os.environ.get("TF_CONFIG", "")


def find_task() -> Task:
    """Return this process's task; raise `ValueError` without servers in `TF_CONFIG`."""
    tf_config.check_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    jobs = {job: cluster.num_tasks(job) for job in cluster.jobs}
    if not jobs.get("ps", 0):
        raise ValueError(
            "The cluster in the environment variable TF_CONFIG must have a server, a "
            "task of type `ps`. `tf-dgc run --servers 1 --workers N` sets TF_CONFIG. "
            f"Received: a cluster without a task of type `ps`, {cluster.as_dict()}"
        )
    job, index = resolver.task_type, int(resolver.task_id or 0)
    num_workers = jobs.get("chief", 0) + jobs.get("worker", 0)
    if not num_workers or job not in ("ps", "chief", "worker"):
        raise ValueError(
            "In a cluster with a server, tasks must be of type `ps`, `worker` or "
            "`chief`, at least one of them `worker` or `chief`. Received: task "
            f"{job} {index} in the cluster {cluster.as_dict()}"
        )
    servers = tuple(cluster.task_address("ps", i) for i in range(jobs["ps"]))
    if job == "ps":
        return Task(servers, num_workers, None, index)
    offset = jobs.get("chief", 0) if job == "worker" else 0
    return Task(servers, num_workers, index + offset)
