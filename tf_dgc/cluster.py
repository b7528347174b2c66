"""The cluster: what `TF_CONFIG` says, and whether all workers agree."""

import contextlib
import contextvars
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_dgc import _internals, coordination, failures
from tf_dgc.workers import (
    ALONE_VARIABLE,
    TIMEOUT_VARIABLE,
    everyone,
    full_name,
    me,
    peers,
    timeout_seconds,
)

_ANSWER_SECONDS = 2.0
_numbers = itertools.count()  # equal on all workers, as all call the same functions


def check_tf_config(strategy: tf.distribute.Strategy | None = None) -> None:
    """Raise `ValueError` if `TF_CONFIG` is set but cannot be what was meant.

    TensorFlow itself trains alone, silently, when the cluster, or its strategy, is
    missing.

    Args:
        strategy: what the cluster is used by, if it is there already.
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


def _check_takes_part(strategy: tf.distribute.Strategy, num_workers: int) -> None:
    multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if multi_worker or os.environ.get(ALONE_VARIABLE) == "1":
        return
    what = (
        f"TF_CONFIG names {num_workers} workers, but there is no "
        "`MultiWorkerMirroredStrategy` in scope here, so each of them trains alone. "
        "Begin with `strategy = tf_dgc.multi_worker_strategy()`, and make or load "
        "model and optimizer `with strategy.scope():`. If each is to train alone, set "
        f"the environment variable {ALONE_VARIABLE}=1. Received: strategy={strategy!r}"
    )
    if not _loading.get():
        raise ValueError(what)
    warnings.warn(what, stacklevel=2)


_loading = contextvars.ContextVar("loading", default=False)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Within, an optimizer that takes part in no cluster is only warned of.

    Who loads a model may want to look at it, or to predict.
    """
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Whether other processes take part in this strategy."""
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)
        and _internals.has_coordination_service()
    )


def rendezvous(strategy: tf.distribute.Strategy, purpose: str) -> None:
    """Wait until all workers arrive.

    Args:
        strategy: the strategy whose workers meet; nothing is done if it has only one.
        purpose: for the error, e.g. "read `residual`".

    Raises:
        RuntimeError: on every worker that did arrive, if one does not within
            `TF_DGC_TIMEOUT` seconds. Collectives pending elsewhere fail with the same
            message.
    """
    if not is_multi_worker(strategy):
        return
    seconds = timeout_seconds()
    name = f"tf_dgc/{next(_numbers)}"
    try:
        coordination.wait_at_barrier(name, seconds)
    except tf.errors.OpError as error:
        raise _in_vain(strategy, name, purpose, seconds, error) from error


def _in_vain(
    strategy: tf.distribute.Strategy,
    barrier: str,
    purpose: str,
    seconds: float,
    error: tf.errors.OpError,
) -> RuntimeError:
    """Return the error to raise when the workers have not met."""
    reason = failures.find_reason(strategy, str(error.message))
    name = full_name(strategy, me(strategy))
    if reason is not None and failures.DOES_NOT_COME in reason and name in reason:
        # The others wait for this worker, somewhere else, and know it.
        return RuntimeError(
            f"tf_dgc: {name} waited for the others to {purpose}, and meanwhile "
            f"{reason}. {_ALL_ALIKE}"
        )
    if reason is not None and failures.told.is_set():
        return failures.give_up(strategy, reason)
    if reason is not None:
        meanwhile = f"Meanwhile {me(strategy)} waited for the others to {purpose}"
        return failures.give_up(strategy, f"{reason}. {meanwhile}")
    if not isinstance(error, tf.errors.DeadlineExceededError):
        what = f"could not meet the others to {purpose}"
        return failure(strategy, f"{what}. TensorFlow says: {error.message}")
    missing = " and ".join(_missing(strategy, barrier))
    return failure(
        strategy,
        f"waited {seconds:g} s for {missing} to {purpose}, in vain. {_ALL_ALIKE} If a "
        f"worker is only slow, set {TIMEOUT_VARIABLE} to more seconds. TensorFlow "
        f"says: {error.message}",
    )


_ALL_ALIKE = (
    "All workers must run the same program: the same model, the same optimizer, and "
    "calls that involve the optimizer's state (such as `model.save`) on every worker, "
    "not on the chief alone."
)


def _missing(strategy: tf.distribute.Strategy, barrier: str) -> list[str]:
    """Return who did not come to a barrier, of which those who did all have heard."""

    def came(name: str) -> bool:
        try:
            return bool(coordination.lookup(f"{barrier}/{name}", _ANSWER_SECONDS))
        except tf.errors.OpError:
            return False

    with contextlib.suppress(tf.errors.OpError):
        key = f"{barrier}/{me(strategy)}"
        coordination.publish(key, "here", _ANSWER_SECONDS)
    missing = [full_name(strategy, name) for name in peers(strategy) if not came(name)]
    return missing or ["the others"]


def failure(strategy: tf.distribute.Strategy, what: str) -> RuntimeError:
    """Tell the other workers that this one fails; return the error to raise.

    Collectives that they wait in end with the same message.

    Args:
        strategy: whose workers are told.
        what: what happened, to follow the worker's name.
    """
    message = f"tf_dgc: {full_name(strategy, me(strategy))} {what}"
    failures.report(message)
    return RuntimeError(message)


_SAME_ARGUMENTS = (
    "The workers were started with different models or settings. All must run the same "
    "program with the same arguments."
)


def agree(
    strategy: tf.distribute.Strategy,
    describe: Callable[[], dict[str, Any]],
    otherwise: str = _SAME_ARGUMENTS,
) -> None:
    """Raise on all workers, naming the differences, unless their descriptions agree.

    Args:
        strategy: the strategy whose workers are compared.
        describe: returns nested dictionaries and lists of JSON values; it is called
            only if there are other workers.
        otherwise: what the error says before the differences.

    Raises:
        ValueError: on every worker, if two descriptions differ.
        RuntimeError: if a worker does not come to be compared.
    """
    if not is_multi_worker(strategy):
        return
    text = json.dumps(describe(), sort_keys=True, default=str)
    purpose = f"compare models and settings (here: {_shorten(text)})"
    mine = dict(_flatten(json.loads(text)))
    differences = []
    for peer, theirs_text in exchange_notes(strategy, text, purpose).items():
        theirs = dict(_flatten(json.loads(theirs_text)))
        differences += [
            f"  {key}: {mine.get(key, 'nothing')!r} on {me(strategy)}, "
            f"{theirs.get(key, 'nothing')!r} on {peer}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]
    if differences:
        raise ValueError(f"{otherwise} Differences:\n" + "\n".join(differences))


def exchange_notes(
    strategy: tf.distribute.Strategy, note: str, purpose: str
) -> dict[str, str]:
    """Return the notes of all workers, by worker, this one's among them.

    Args:
        strategy: the strategy whose workers exchange notes.
        note: of this worker.
        purpose: for the error, to follow "waited for the other workers to".

    Raises:
        RuntimeError: as `rendezvous`.
    """
    if not is_multi_worker(strategy):
        return {"": note}
    number = next(_numbers)
    key = f"tf_dgc/{number}/{me(strategy)}"
    with failures.named(strategy):
        coordination.publish(key, note, timeout_seconds())
    rendezvous(strategy, purpose)
    with failures.named(strategy):
        notes = {
            peer: coordination.lookup(f"tf_dgc/{number}/{peer}", timeout_seconds())
            for peer in everyone(strategy)
        }
    # Nobody goes on, or dies, before all have read.
    rendezvous(strategy, purpose)
    with contextlib.suppress(tf.errors.OpError):
        coordination.unpublish(key, _ANSWER_SECONDS)
    return notes


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this worker does what is to be done once; true without other workers."""
    return not is_multi_worker(strategy) or me(strategy) == everyone(strategy)[0]


def _wrong(what: str, text: str) -> str:
    return (
        f"The environment variable TF_CONFIG {what}. Expected, for example: "
        '{"cluster": {"worker": ["host0:12345", "host1:12345"]}, '
        '"task": {"type": "worker", "index": 0}}; `tf-dgc run` sets it for you. '
        f"Received: {text}"
    )


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, leaf) of nested dictionaries and lists."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, item in value.items():
        yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))


def _shorten(text: str, length: int = 2000) -> str:
    return text if len(text) <= length else text[:length] + " ..."
