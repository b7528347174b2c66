"""Strategies that Keras 3 can train under: `prepare` and `multi_worker_strategy`."""

import atexit
import contextlib
import time
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

import tensorflow as tf

from tf_dgc._internals import save_hooks, tf_collectives
from tf_dgc._internals.coordination import (
    configure_coordination,
    enabling_collectives_by,
    is_in_a_cluster,
    is_too_late_for_a_cluster,
)
from tf_dgc.arguments import show
from tf_dgc.multiworker import (
    background,
    consensus,
    coordination,
    failures,
    interrupts,
    keras_saving,
    loss_scale,
    rendezvous,
    tf_config,
    workers,
)
from tf_dgc.multiworker.cross_device import SUPPORTED, cross_device_ops
from tf_dgc.multiworker.initial_values import InitialValues, report_failed_variables
from tf_dgc.multiworker.training_loops import StrategyLoops
from tf_dgc.multiworker.watch import Watch

Strategy = TypeVar("Strategy", bound=tf.distribute.Strategy)
Options: TypeAlias = tf.distribute.experimental.CommunicationOptions

# This process's strategy of several workers and its options: a process joins a cluster
# only once.
_joined: list[tuple[tf.distribute.Strategy, Options | None]] = []


def multi_worker_strategy(
    communication_options: Options | None = None,
) -> tf.distribute.Strategy:
    """Return a prepared `MultiWorkerMirroredStrategy`, or name the missing workers.

    TensorFlow's own constructor waits very long for a worker that died while it
    started, and cannot be interrupted. This function first waits for all workers that
    `TF_CONFIG` names, on the ports given there, for at most `TF_DGC_START_TIMEOUT`
    seconds (environment variable, default 45). It also passes
    `TF_DGC_HEARTBEAT_TIMEOUT` (default 10) to TensorFlow: the seconds without a
    heartbeat after which a worker counts as gone.

    All workers must call it in the same way:

    >>> strategy = tf_dgc.multi_worker_strategy()

    A second call returns the same strategy: TensorFlow joins a cluster only once.

    Args:
        communication_options: options of the strategy; see
            `tf.distribute.MultiWorkerMirroredStrategy`.

    Returns:
        The strategy, as `tf_dgc.prepare` returns it. For a task of type `evaluator`,
        which is not part of the cluster and evaluates on its own, the default strategy.

    Raises:
        ValueError: if `TF_CONFIG` is invalid, the task is of type `ps`, or the options
            differ from those of the first call.
        RuntimeError: if a worker does not start in time (the error names it), if
            TensorFlow was used before this call, or if another strategy has joined the
            cluster.
    """
    failures.show_own_errors_plainly()
    tf_config.check_tf_config()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "evaluator":
        return prepare(tf.distribute.get_strategy())
    addresses = workers.addresses(resolver.cluster_spec())
    this_worker = f"{resolver.task_type} {resolver.task_id}"
    if len(addresses) > 1 and is_in_a_cluster():
        return _joined_strategy(communication_options)
    seconds = workers.start_timeout_seconds()
    if resolver.cluster_spec() and this_worker not in addresses:
        raise ValueError(_NO_WORKER + repr(resolver.task_type))
    if addresses and is_too_late_for_a_cluster():
        raise RuntimeError(_TOO_LATE)
    if len(addresses) > 1 and this_worker in addresses:
        rendezvous.wait_for_all_workers(addresses, this_worker, seconds)
        configure_coordination(
            resolver.cluster_spec(), workers.heartbeat_timeout_seconds(), seconds
        )
    with (
        _naming_silent_workers(addresses, this_worker, seconds),
        enabling_collectives_by(
            lambda context, server: coordination.enable_collectives(
                context, server, seconds
            )
        ),
    ):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver, communication_options=communication_options
        )
    if len(addresses) > 1:
        _joined.append((strategy, communication_options))
    return prepare(strategy)


def prepare(strategy: Strategy) -> Strategy:
    """Make a stock strategy ready for Keras 3 and for compressed training.

    `DGCOptimizer` calls this for the strategy in whose scope it is created. Call it
    yourself to train with any other optimizer under `MultiWorkerMirroredStrategy`,
    where stock Keras 3 cannot `fit`:

    >>> strategy = tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())

    If TensorFlow's constructor says "Collective ops must be configured at program
    startup", something used TensorFlow before: move this line up, right after the
    imports.

    In a prepared strategy, a step of `fit` communicates once, to exchange gradients.
    The logs of a step are those of this worker; the logs of an epoch are the exact
    values over all workers. If a callback of one worker sets `model.stop_training`, all
    workers stop. Moving statistics of batch normalizations are averaged over workers:
    see `average_statistics`.

    If a worker does not arrive at a collective within `TF_DGC_TIMEOUT` seconds
    (environment variable, default 40), all workers end with an error that names it. A
    worker that traces a `tf.function` gets more time, `TF_DGC_TRACING_TIMEOUT` (default
    1200). Each worker also starts a watchdog process. It prints the worker's stack and
    ends the worker if `fit` makes no progress after another worker has gone.

    Args:
        strategy: a `tf.distribute.MultiWorkerMirroredStrategy` or `MirroredStrategy`
            instance, changed in place; or the default strategy, left as it is.

    Returns:
        The same strategy.

    Raises:
        ValueError: for other kinds of strategy, or if `TF_CONFIG` is invalid, also
            because it names several workers and this strategy has only one.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ValueError(
            "`prepare` needs a strategy, for example "
            "`tf.distribute.MultiWorkerMirroredStrategy()`, or "
            "`tf.distribute.get_strategy()` for the one in whose scope it is called. "
            f"Received: strategy={show(strategy)}"
        )
    failures.show_own_errors_plainly()
    tf_config.check_tf_config(strategy)
    if strategy.num_replicas_in_sync > 1:
        cross_device_ops(strategy)
    prepared = getattr(strategy, "_tf_dgc_prepared", False)
    if not prepared and isinstance(strategy, SUPPORTED):
        strategy._tf_dgc_prepared = True
        save_hooks.wrap_saving()
        loops = StrategyLoops(strategy)
        if consensus.is_multi_worker(strategy):
            _watch_workers(strategy)
            loops.call_with_models(
                lambda model: keras_saving.prepare_saving(strategy, model)
            )
            loops.call_before_fit(
                lambda callbacks: keras_saving.share_callbacks(strategy, callbacks)
            )
        loss_scale.synchronize_loss_scale(strategy)
        tf_collectives.allow_conditions(strategy)
        tf_collectives.check_updates(strategy, _reject_variable_of_other_scope)
    return strategy


def creating_zero_variables(
    strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager[None]:
    """Return a context that compares zero variables at once, the same on all."""
    values = getattr(strategy, "_tf_dgc_initial_values", None)
    return contextlib.nullcontext() if values is None else values.zeros_expected()


def _reject_variable_of_other_scope(variable: tf.Variable) -> None:
    raise ValueError(
        "The model was created outside of `strategy.scope()`, and its optimizer within "
        "it. Move the call that creates the model, such as `keras.Sequential(...)`, "
        "`keras.Model(...)` or `keras.models.load_model(...)`, into "
        f"`with strategy.scope():`. Received: variable {variable.name}"
    )


def _watch_workers(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Make all workers end, and name the worker that failed, if one of them fails."""
    watch = Watch(
        strategy,
        lambda: background.count_background_collectives(strategy),
        lambda: background.pending_keys(strategy),
    )
    failures.report_uncaught_exceptions(strategy)
    interrupts.deliver_keyboard_interrupts()
    report_failed_variables(strategy)
    strategy._tf_dgc_initial_values = InitialValues(strategy, watch.waiting)
    strategy._tf_dgc_watch = watch
    watch.start()


def _joined_strategy(options: Options | None) -> tf.distribute.Strategy:
    """Return this process's strategy."""
    # Constructing another one would restart the cluster's collectives while other
    # workers may be in those of the first; TensorFlow then sometimes ends them.
    if not _joined:
        raise RuntimeError(_JOINED)
    strategy, first_options = _joined[-1]
    if options is not None and (
        first_options is None or vars(options) != vars(first_options)
    ):
        raise ValueError(
            "`multi_worker_strategy` was called before, and TensorFlow joins a cluster "
            "only once. Call it once, or with the same options. Received: "
            f"communication_options={options}, before: {first_options}"
        )
    return strategy


@contextlib.contextmanager
def _naming_silent_workers(
    addresses: dict[str, str], this_worker: str, seconds: float
) -> Iterator[None]:
    """Name the workers that die or are stopped after all have met."""
    try:
        yield
    except tf.errors.OpError as error:
        if this_worker not in addresses:  # it connects to nobody
            raise
        silent = rendezvous.silent_workers(addresses, this_worker)
        if not silent:
            raise
        # Keep this worker's server alive for the others, which now look for it too.
        time.sleep(rendezvous.ANSWER_SECONDS)
        failures.reported.set()
        atexit.register(failures.limit_teardown)
        raise rendezvous.missing_workers_error(
            addresses, this_worker, silent, seconds
        ) from error


_NO_WORKER = (
    "`multi_worker_strategy` is for tasks of type `chief` or `worker` (an `evaluator` "
    "gets the default strategy). A parameter server, of type `ps`, is run by `tf-dgc "
    "serve`, and its workers train with `tf_dgc.ServerOptimizer`, without a strategy. "
    "Received, by the environment variable TF_CONFIG: a task of type "
)
_JOINED = (
    "TensorFlow has joined the workers' cluster by another strategy of this process, "
    "and joins it only once. Pass that one to `tf_dgc.prepare(strategy)`, or create it "
    "by `tf_dgc.multi_worker_strategy()`, which returns it whenever it is called again."
)
_TOO_LATE = (
    "TensorFlow was used before it joined the workers' cluster, which it can only do "
    "at the start. Move `strategy = tf_dgc.multi_worker_strategy()` to the top of the "
    "program, right after the imports: before anything that creates a tensor, a "
    "variable, a layer or model, an optimizer or a `tf.data.Dataset`, that calls a "
    "`tf.function` or `keras.ops`, or lists logical devices. Code at the top level of "
    "imported modules counts, too."
)
