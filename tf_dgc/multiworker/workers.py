"""Names and addresses of workers, and their timeouts."""

import math
import os

import tensorflow as tf

SINGLE_WORKER_VARIABLE = "TF_DGC_ALONE"
TIMEOUT_VARIABLE = "TF_DGC_TIMEOUT"
START_TIMEOUT_VARIABLE = "TF_DGC_START_TIMEOUT"
TRACING_TIMEOUT_VARIABLE = "TF_DGC_TRACING_TIMEOUT"
HEARTBEAT_TIMEOUT_VARIABLE = "TF_DGC_HEARTBEAT_TIMEOUT"


def own_name(strategy: tf.distribute.Strategy) -> str:
    """Return this worker's name, for example "worker 1"."""
    resolver = strategy.cluster_resolver
    return f"{resolver.task_type} {resolver.task_id}"


def all_names(strategy: tf.distribute.Strategy) -> list[str]:
    """Return the names of all workers; the first one coordinates the others."""
    return list(addresses(strategy.cluster_resolver.cluster_spec()))


def other_names(strategy: tf.distribute.Strategy) -> list[str]:
    """Return the names of all workers but this one."""
    return [name for name in all_names(strategy) if name != own_name(strategy)]


def full_name(strategy: tf.distribute.Strategy, name: str) -> str:
    """Return a worker's name with its address, for errors."""
    address = addresses(strategy.cluster_resolver.cluster_spec()).get(name)
    return name if address is None else f"{name} ({address})"


def index(strategy: tf.distribute.Strategy) -> int:
    """Return the index of this process among all workers; 0 if it is the only one."""
    resolver = getattr(strategy, "cluster_resolver", None)
    names = list(addresses(resolver.cluster_spec())) if resolver else []
    return names.index(own_name(strategy)) if names else 0


def addresses(cluster: tf.train.ClusterSpec) -> dict[str, str]:
    """Return the address of every worker by its name, in the order of workers."""
    return {
        f"{job} {index}": cluster.task_address(job, index)
        for job in ("chief", "worker")
        if job in cluster.jobs
        for index in cluster.task_indices(job)
    }


def hosts(strategy: tf.distribute.Strategy) -> list[str]:
    """Return the host of each replica, by index; "" for all if there is one process."""
    num_replicas = strategy.num_replicas_in_sync
    resolver = getattr(strategy, "cluster_resolver", None)
    by_name = addresses(resolver.cluster_spec()) if resolver else {}
    if not by_name:
        return [""] * num_replicas
    worker_hosts = [address.rpartition(":")[0] for address in by_name.values()]
    per_worker = num_replicas // len(worker_hosts)
    return [host for host in worker_hosts for _ in range(per_worker)]


def timeout_seconds() -> float:
    """Return how long to wait for a worker: `TF_DGC_TIMEOUT`, default 40."""
    return _seconds(TIMEOUT_VARIABLE, 40)


def start_timeout_seconds() -> float:
    """Return how long a worker may take to start: `TF_DGC_START_TIMEOUT` or 45."""
    return _seconds(START_TIMEOUT_VARIABLE, 45)


def tracing_timeout_seconds() -> float:
    """Return how long a worker may trace: `TF_DGC_TRACING_TIMEOUT`, default 1200."""
    return max(timeout_seconds(), _seconds(TRACING_TIMEOUT_VARIABLE, 1200))


def heartbeat_timeout_seconds() -> float:
    """Return when a silent worker is gone: `TF_DGC_HEARTBEAT_TIMEOUT`, default 10."""
    return _seconds(HEARTBEAT_TIMEOUT_VARIABLE, 10)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"The environment variable {variable} must be a positive number of "
            f"seconds. Received: {text!r}"
        )
    return seconds
