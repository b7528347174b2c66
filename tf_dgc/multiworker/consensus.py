"""Barriers, comparisons and short texts between workers, without collectives."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_dgc._internals.coordination import has_coordination_service
from tf_dgc.multiworker import coordination, failures
from tf_dgc.multiworker.workers import (
    TIMEOUT_VARIABLE,
    all_names,
    full_name,
    other_names,
    own_name,
    timeout_seconds,
    tracing_timeout_seconds,
)

_ANSWER_SECONDS = 2.0
_numbers = itertools.count()  # equal on all workers, as all call the same functions
_SAME_ARGUMENTS = (
    "The workers were started with different models or settings. All must run the same "
    "program with the same arguments."
)
_ALL_ALIKE = (
    "All workers must run the same program: the same model, the same optimizer, and "
    "calls that involve the optimizer's state (such as `model.save`) on every worker, "
    "not on the chief alone."
)


def is_multi_worker(strategy: tf.distribute.Strategy) -> bool:
    """Whether other processes take part in this strategy."""
    return (
        isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        and strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)
        and has_coordination_service()
    )


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this worker does what only one does; true without other workers."""
    return not is_multi_worker(strategy) or own_name(strategy) == all_names(strategy)[0]


def require_equal(
    strategy: tf.distribute.Strategy,
    describe: Callable[[], dict[str, Any]],
    message: str = _SAME_ARGUMENTS,
    purpose: str | None = None,
    seconds: float | None = None,
) -> None:
    """Raise `ValueError` on all workers, naming differences, unless they agree."""
    # `describe` returns nested dictionaries and lists of JSON values, and is called
    # only if there are other workers. `purpose` is text for the error if a worker does
    # not come within `seconds` (default `TF_DGC_TIMEOUT`); None names this worker's
    # description.
    if not is_multi_worker(strategy):
        return
    text = json.dumps(describe(), sort_keys=True, default=str)
    purpose = purpose or f"compare models and settings (here: {_shorten(text)})"
    local = dict(_flatten(json.loads(text)))
    differences = []
    for peer, peer_text in exchange_texts(strategy, text, purpose, seconds).items():
        remote = dict(_flatten(json.loads(peer_text)))
        differences += [
            f"  {key}: {local.get(key, 'nothing')!r} on {own_name(strategy)}, "
            f"{remote.get(key, 'nothing')!r} on {peer}"
            for key in sorted(local.keys() | remote.keys())
            if local.get(key) != remote.get(key)
        ]
    if differences:
        raise ValueError(f"{message} Differences:\n" + "\n".join(differences))


def require_equal_while_tracing(
    strategy: tf.distribute.Strategy,
    describe: Callable[[], dict[str, Any]],
    message: str,
    purpose: str,
) -> None:
    """Call `require_equal` where workers may trace for a long time first.

    The watch ends the wait if a worker does not come, as in a collective.
    """
    watch = getattr(strategy, "_tf_dgc_watch", None)
    if watch is not None:
        with watch.waiting(purpose):
            # Longer than the watch waits, because its error names the worker.
            seconds = tracing_timeout_seconds() + 2 * timeout_seconds()
            require_equal(strategy, describe, message, purpose, seconds)


def exchange_texts(
    strategy: tf.distribute.Strategy,
    text: str,
    purpose: str,
    seconds: float | None = None,
) -> dict[str, str]:
    """Return the texts of all workers, by name; raise as `wait_for_workers`."""
    if not is_multi_worker(strategy):
        return {"": text}
    number = next(_numbers)
    key = f"tf_dgc/{number}/{own_name(strategy)}"
    with failures.naming_workers(strategy):
        coordination.publish(key, text, timeout_seconds())
    wait_for_workers(strategy, purpose, seconds)
    with failures.naming_workers(strategy):
        texts = {
            name: coordination.lookup(f"tf_dgc/{number}/{name}", timeout_seconds())
            for name in all_names(strategy)
        }
    # Nobody continues, or dies, before all have read.
    wait_for_workers(strategy, purpose)
    with contextlib.suppress(tf.errors.OpError):
        coordination.unpublish(key, _ANSWER_SECONDS)
    return texts


def wait_for_workers(
    strategy: tf.distribute.Strategy, purpose: str, seconds: float | None = None
) -> None:
    """Wait until all workers arrive; return at once if there is only one."""
    # After `seconds` (default `TF_DGC_TIMEOUT`) all that did arrive raise
    # `RuntimeError`, and collectives pending elsewhere fail with the same message.
    if not is_multi_worker(strategy):
        return
    seconds = seconds or timeout_seconds()
    barrier = f"tf_dgc/{next(_numbers)}"
    try:
        coordination.wait_at_barrier(barrier, seconds)
    except tf.errors.OpError as error:
        raise _barrier_error(strategy, barrier, purpose, seconds, error) from error


def worker_failure(strategy: tf.distribute.Strategy, description: str) -> RuntimeError:
    """Report to the other workers that this one fails; return the error to raise."""
    message = f"tf_dgc: {full_name(strategy, own_name(strategy))} {description}"
    failures.report_failure(message)
    return RuntimeError(message)


def _barrier_error(
    strategy: tf.distribute.Strategy,
    barrier: str,
    purpose: str,
    seconds: float,
    error: tf.errors.OpError,
) -> RuntimeError:
    reason = failures.find_reason(strategy, str(error.message))
    name = full_name(strategy, own_name(strategy))
    someone_missing = reason and failures.DOES_NOT_COME in reason
    if reason and someone_missing and name in reason.partition(" for ")[2]:
        # The others wait for this worker elsewhere, and have reported it.
        return RuntimeError(
            f"tf_dgc: {name} waited for the others to {purpose}, and meanwhile "
            f"{reason}. {_ALL_ALIKE}"
        )
    if reason is not None and failures.reported.is_set():
        return failures.stop_this_worker(strategy, reason)
    if reason is not None:
        context = f"Meanwhile {own_name(strategy)} waited for the others to {purpose}"
        return failures.stop_this_worker(strategy, f"{reason}. {context}")
    if not isinstance(error, tf.errors.DeadlineExceededError):
        return worker_failure(
            strategy,
            f"could not meet the others to {purpose}. TensorFlow says: {error.message}",
        )
    missing = " and ".join(_missing_workers(strategy, barrier))
    return worker_failure(
        strategy,
        f"waited {seconds:g} s for {missing} to {purpose}, in vain. {_ALL_ALIKE} If a "
        f"worker is only slow, set {TIMEOUT_VARIABLE} to more seconds. TensorFlow "
        f"says: {error.message}",
    )


def _missing_workers(strategy: tf.distribute.Strategy, barrier: str) -> list[str]:
    def has_arrived(name: str) -> bool:
        try:
            return bool(coordination.lookup(f"{barrier}/{name}", _ANSWER_SECONDS))
        except tf.errors.OpError:
            return False

    with contextlib.suppress(tf.errors.OpError):
        key = f"{barrier}/{own_name(strategy)}"
        coordination.publish(key, "here", _ANSWER_SECONDS)
    missing = [
        full_name(strategy, name)
        for name in other_names(strategy)
        if not has_arrived(name)
    ]
    return missing or ["the others"]


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
