"""Start-up: all workers meet before TensorFlow waits for them without a limit."""

import atexit
import contextlib
import time
from collections.abc import Iterator
from typing import TypeAlias

import tensorflow as tf

from tf_dgc._internals import service
from tf_dgc.cluster import arriving, coordination, failures, tf_config, workers
from tf_dgc.distribute.preparation import prepare

Options: TypeAlias = tf.distribute.experimental.CommunicationOptions


def multi_worker_strategy(
    communication_options: Options | None = None,
) -> tf.distribute.Strategy:
    """Return a prepared `MultiWorkerMirroredStrategy`, or say which worker is missing.

    TensorFlow's own constructor waits very long for a worker that died while it
    started, and cannot be interrupted. This function first waits for all workers that
    `TF_CONFIG` names, on the ports they have there, for `TF_DGC_START_TIMEOUT` seconds
    at most (environment variable, default 45). It also passes
    `TF_DGC_HEARTBEAT_TIMEOUT` (default 10) to TensorFlow: the seconds without a
    heartbeat after which a worker counts as gone.

    All workers must call it alike:

    >>> strategy = tf_dgc.multi_worker_strategy()

    Called again it returns the same strategy: TensorFlow joins a cluster only once.

    Args:
        communication_options: options of the strategy; see
            `tf.distribute.MultiWorkerMirroredStrategy`.

    Returns:
        The strategy, as `tf_dgc.prepare` leaves it. For a task of type `evaluator`,
        which stands beside the workers, the default strategy: it evaluates by itself.

    Raises:
        ValueError: for a `TF_CONFIG` that cannot be right, or a task of type `ps`.
            Or for options other than those of the first call.
        RuntimeError: naming the workers that did not come in time; and if TensorFlow
            was used before, or has joined the cluster by a strategy made otherwise.
    """
    failures.show_own_errors_plainly()
    tf_config.check_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "evaluator":
        return prepare(tf.distribute.get_strategy())
    addresses = workers.addresses(resolver.cluster_spec())
    me = f"{resolver.task_type} {resolver.task_id}"
    if len(addresses) > 1 and service.is_in_a_cluster():
        return _made_before(communication_options)
    limit = workers.start_timeout_seconds()
    if resolver.cluster_spec() and me not in addresses:
        raise ValueError(_NO_WORKER + repr(resolver.task_type))
    if addresses and service.is_too_late_for_a_cluster():
        raise RuntimeError(_TOO_LATE)
    if len(addresses) > 1 and me in addresses:
        arriving.meet(addresses, me, limit)
        service.configure_coordination(
            resolver.cluster_spec(), workers.heartbeat_timeout_seconds(), limit
        )
    with (
        _named(addresses, me, limit),
        service.enabling_collectives_by(
            lambda context, server: coordination.enable_collectives(
                context, server, limit
            )
        ),
    ):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver, communication_options=communication_options
        )
    if len(addresses) > 1:
        _made.append((strategy, communication_options))
    return prepare(strategy)


_made: list[tuple[tf.distribute.Strategy, Options | None]] = []


def _made_before(options: Options | None) -> tf.distribute.Strategy:
    """Return this process's strategy.

    Another one would begin the collectives of the cluster anew, while other workers may
    be in those of the first: TensorFlow's constructor ends them now and then.
    """
    if not _made:
        raise RuntimeError(_JOINED)
    strategy, before = _made[-1]
    if options is not None and (before is None or vars(options) != vars(before)):
        raise ValueError(
            "`multi_worker_strategy` was called before, and TensorFlow joins a cluster "
            "only once. Call it once, or with the same options. Received: "
            f"communication_options={options}, before: {before}"
        )
    return strategy


_NO_WORKER = (
    "`multi_worker_strategy` is for tasks of type `chief` or `worker` (an `evaluator` "
    "gets the default strategy). A parameter server, of type `ps`, is run by `tf-dgc "
    "serve`, and its workers train with `tf_dgc.ServerOptimizer`, without a strategy. "
    "Received, by the environment variable TF_CONFIG: a task of type "
)
_JOINED = (
    "TensorFlow has joined the workers' cluster by another strategy of this process, "
    "and joins it only once. Use that one, by `tf_dgc.prepare(strategy)`, or make it "
    "by `tf_dgc.multi_worker_strategy()`, which returns it to whoever calls it again."
)
_TOO_LATE = (
    "TensorFlow was used before it was to join the workers' cluster, which it can only "
    "do at the start. Move `strategy = tf_dgc.multi_worker_strategy()` to the top of "
    "the program, right behind the imports: before everything that makes a tensor, a "
    "variable, a layer or model, an optimizer or a `tf.data.Dataset`, that calls a "
    "`tf.function` or `keras.ops`, or asks for logical devices. What stands at the top "
    "level of imported modules counts, too."
)


@contextlib.contextmanager
def _named(addresses: dict[str, str], me: str, seconds: float) -> Iterator[None]:
    """Name the workers that die or are stopped after all have met.

    TensorFlow only says that it waited.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if me not in addresses:  # it connects to nobody
            raise
        silent = arriving.silent(addresses, me)
        if not silent:
            raise
        # So that the others, who ask now, get an answer.
        time.sleep(arriving.ANSWER_SECONDS)
        failures.told.set()
        atexit.register(failures.limit_teardown)
        raise arriving.in_vain(addresses, me, silent, seconds) from error
