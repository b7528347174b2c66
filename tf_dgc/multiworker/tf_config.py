"""What `TF_CONFIG` says, and whether it can be what was meant."""

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
    """Raise `ValueError` if `TF_CONFIG` is set but cannot be what was meant.

    TensorFlow itself trains alone, silently, when the cluster, or its strategy, is
    missing.

    Args:
        strategy: strategy that the cluster is used by, if it is there already.
    """
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(_wrong(f"is not JSON ({error})", text)) from error
    if not isinstance(config, dict):
        raise ValueError(_wrong("must be a JSON object", text))
    if not config:
        return
    if not isinstance(config.get("cluster"), dict) or not config["cluster"]:
        raise ValueError(_wrong("lacks a `cluster`", text))
    # Read as TensorFlow does, which takes numbers in quotes, and jobs as dictionaries.
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    try:
        cluster = resolver.cluster_spec()
        task_type, task_id = resolver.task_type, resolver.task_id
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(_wrong(f"cannot be read ({error})", text)) from error
    if wrong := _wrong_address(cluster):
        raise ValueError(_wrong(wrong, text))
    if task_type == "evaluator":  # stands beside the cluster
        return
    jobs = {job: cluster.num_tasks(job) for job in cluster.jobs}
    if task_id is None or not 0 <= task_id < jobs.get(task_type, 0):
        raise ValueError(
            _wrong("names a task not in its cluster (index out of range?)", text)
        )
    num_workers = jobs.get("chief", 0) + jobs.get("worker", 0)
    if strategy is not None and num_workers > 1:
        _check_takes_part(strategy, num_workers)


def _wrong_address(cluster: tf.train.ClusterSpec) -> str | None:
    """Return what is wrong with an address that some process listens on."""
    found = [
        cluster.task_address(job, index)
        for job in cluster.jobs
        if job != "evaluator"
        for index in cluster.task_indices(job)
    ]
    if len(found) == 1:  # it listens nowhere
        return None
    for address in found:
        host, _, port = address.rpartition(":")
        if not host or not arguments.is_port(port):
            return (
                f"names {address!r}, which is not a host, a colon and a port from 1 "
                f"to {arguments.LAST_PORT}"
            )
        if found.count(address) > 1:
            return f"names {address!r} twice, where each process needs its own"
    return None


def _check_takes_part(strategy: tf.distribute.Strategy, num_workers: int) -> None:
    multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if multi_worker or _alone.get() or os.environ.get(SINGLE_WORKER_VARIABLE) == "1":
        return
    what = (
        f"TF_CONFIG names {num_workers} workers, but there is no "
        "`MultiWorkerMirroredStrategy` in scope here, so each of them trains alone. "
        "Begin with `strategy = tf_dgc.multi_worker_strategy()`, and make or load "
        "model and optimizer `with strategy.scope():`. If each is to train alone, set "
        f"the environment variable {SINGLE_WORKER_VARIABLE}=1. Received: "
        f"strategy={show(strategy)}"
    )
    if not _loading.get():
        raise ValueError(what)
    warnings.warn(what, stacklevel=2)


_alone = contextvars.ContextVar("alone", default=False)


@contextlib.contextmanager
def single_worker() -> Iterator[None]:
    """Within, an optimizer that takes part in no cluster is meant to."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


_loading = contextvars.ContextVar("loading", default=False)


@contextlib.contextmanager
def loading_config() -> Iterator[None]:
    """Within, an optimizer that takes part in no cluster is only warned of.

    Who loads a model may want to look at it, or to predict.
    """
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


def is_loading() -> bool:
    """Whether an optimizer is being made of its config."""
    return _loading.get()


def _wrong(what: str, text: str) -> str:
    return (
        f"The environment variable TF_CONFIG {what}. Expected, for example: "
        '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
        '"task": {"type": "worker", "index": 0}}; `tf-dgc run` sets it for you. '
        f"Received: {text}"
    )
