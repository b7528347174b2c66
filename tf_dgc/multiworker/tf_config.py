"""Checks of the environment variable `TF_CONFIG`."""

import contextlib
import contextvars
import json
import os
import warnings
from collections.abc import Iterator

import tensorflow as tf

from tf_dgc import arguments
from tf_dgc.arguments import show
from tf_dgc.multiworker.workers import SINGLE_WORKER_VARIABLE


def check_tf_config(strategy: tf.distribute.Strategy | None = None) -> None:
    """Raise `ValueError` if `TF_CONFIG` is invalid, or not used by `strategy`."""
    # Without a cluster, or a strategy for it, TensorFlow would silently train alone.
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(_error_text(f"is not JSON ({error})", text)) from error
    if not isinstance(config, dict):
        raise ValueError(_error_text("must be a JSON object", text))
    if not config:
        return
    if not isinstance(config.get("cluster"), dict) or not config["cluster"]:
        raise ValueError(_error_text("lacks a `cluster`", text))
    # Read as TensorFlow does, which takes numbers in quotes, and jobs as dictionaries.
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        cluster = resolver.cluster_spec()
        task_type, task_id = resolver.task_type, resolver.task_id
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(_error_text(f"cannot be read ({error})", text)) from error
    if problem := _address_problem(cluster):
        raise ValueError(_error_text(problem, text))
    if task_type == "evaluator":  # not part of the cluster
        return
    jobs = {job: cluster.num_tasks(job) for job in cluster.jobs}
    if task_id is None or not 0 <= task_id < jobs.get(task_type, 0):
        raise ValueError(
            _error_text("names a task not in its cluster (index out of range?)", text)
        )
    num_workers = jobs.get("chief", 0) + jobs.get("worker", 0)
    if strategy is not None and num_workers > 1:
        _check_strategy(strategy, num_workers)


def _address_problem(cluster: tf.train.ClusterSpec) -> str | None:
    addresses = [
        cluster.task_address(job, index)
        for job in cluster.jobs
        if job != "evaluator"
        for index in cluster.task_indices(job)
    ]
    if len(addresses) == 1:  # it listens nowhere
        return None
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not arguments.is_port(port):
            return (
                f"names {address!r}, which is not a host, a colon and a port from 1 "
                f"to {arguments.LAST_PORT}"
            )
        if addresses.count(address) > 1:
            return f"names {address!r} twice, where each process needs its own"
    return None


def _check_strategy(strategy: tf.distribute.Strategy, num_workers: int) -> None:
    multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    single = _single_worker.get() or os.environ.get(SINGLE_WORKER_VARIABLE) == "1"
    if multi_worker or single:
        return
    text = (
        f"TF_CONFIG names {num_workers} workers, but there is no "
        "`MultiWorkerMirroredStrategy` in scope here, so each of them trains alone. "
        "Begin with `strategy = tf_dgc.multi_worker_strategy()`, and create or load "
        "model and optimizer `with strategy.scope():`. To train each alone, set "
        f"the environment variable {SINGLE_WORKER_VARIABLE}=1. Received: "
        f"strategy={show(strategy)}"
    )
    if not _loading.get():
        raise ValueError(text)
    warnings.warn(text, stacklevel=2)


_single_worker = contextvars.ContextVar("single_worker", default=False)


@contextlib.contextmanager
def single_worker() -> Iterator[None]:
    """Allow optimizers without the cluster's strategy within."""
    token = _single_worker.set(True)
    try:
        yield
    finally:
        _single_worker.reset(token)


_loading = contextvars.ContextVar("loading", default=False)


@contextlib.contextmanager
def loading_config() -> Iterator[None]:
    """Warn, not raise, for an optimizer without the cluster's strategy within."""
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


def is_loading() -> bool:
    """Whether an optimizer is being created from its config."""
    return _loading.get()


def _error_text(problem: str, text: str) -> str:
    return (
        f"The environment variable TF_CONFIG {problem}. Expected, for example: "
        '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
        '"task": {"type": "worker", "index": 0}}; `tf-dgc run` sets it for you. '
        f"Received: {text}"
    )
