"""Start-up: all workers meet before TensorFlow waits for them without a limit."""

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc._internals.coordination import (
    configure_coordination,
    enabling_collectives_by,
    is_in_a_cluster,
    is_too_late_for_a_cluster,
)
from tf_dgc.arguments import show
from tf_dgc.collectives import background
from tf_dgc.collectives.cross_device import SUPPORTED, cross_device_ops
from tf_dgc.multiworker import (
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
from tf_dgc.multiworker.initial_values import InitialValues, report_failed_variables
from tf_dgc.multiworker.training_loops import StrategyLoops
from tf_dgc.multiworker.watch import Watch

# --- What Keras 3 needs to train under a stock strategy, and we under Keras.
#
# It acts on one strategy instance; no class or module is changed.

Strategy = TypeVar("Strategy", bound=tf.distribute.Strategy)


def prepare(strategy: Strategy) -> Strategy:
    """Make a stock strategy ready for Keras 3 and for compressed exchange.

    `DGCOptimizer` calls this for the strategy in whose scope it is created. Call it
    yourself to train with any other optimizer under `MultiWorkerMirroredStrategy`,
    where stock Keras 3 cannot `fit`:

    >>> strategy = tf_dgc.prepare(tf.distribute.MultiWorkerMirroredStrategy())

    If TensorFlow's constructor says "Collective ops must be configured at program
    startup", something used TensorFlow before: move this line up, right behind the
    imports.

    A step of `fit` then meets the other workers once, for the gradients. The logs of a
    step are this worker's, those of an epoch are the exact value over all workers.
    Where a callback of one worker sets `model.stop_training`, all workers stop. The
    moving statistics of batch normalizations are averaged over workers: see
    `average_statistics`.

    From here on a worker that waits for another one in a collective for more than
    `TF_DGC_TIMEOUT` seconds (environment variable, default 40) ends with an error that
    names it, and so do all others. A worker that traces a `tf.function` is waited for
    longer, `TF_DGC_TRACING_TIMEOUT` (1200). Each worker starts a process that prints
    the worker's stack and ends it, if it makes no progress in `fit` after another
    worker has gone.

    Args:
        strategy: a `tf.distribute.MultiWorkerMirroredStrategy` or `MirroredStrategy`
            instance, changed in place; or the default strategy, left as it is.

    Returns:
        The same strategy.

    Raises:
        ValueError: for other kinds of strategy, or a `TF_CONFIG` that cannot be right,
            also because it names several workers and this strategy has one.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ValueError(
            "`prepare` needs a strategy, for example "
            "`tf.distribute.MultiWorkerMirroredStrategy()`, or "
            "`tf.distribute.get_strategy()` for the one in whose scope it is called. "
            f"Received: strategy={show(strategy)}"
        )
    tf_config.check_tf_config(strategy)
    if strategy.num_replicas_in_sync > 1:
        cross_device_ops(strategy)
    mended = getattr(strategy, "_tf_dgc_prepared", False)
    if not mended and isinstance(strategy, SUPPORTED):
        strategy._tf_dgc_prepared = True
        loops = StrategyLoops(strategy)
        if consensus.is_multi_worker(strategy):
            _watch_over(strategy)
            saving = functools.partial(keras_saving.prepare_saving, strategy)
            loops.call_with_models(saving)
        loss_scale.synchronize_loss_scale(strategy)
        tf_collectives.allow_conditions(strategy)
        tf_collectives.check_updates(strategy, _refuse_update)
    return strategy


def _refuse_update(variable: tf.Variable) -> None:
    raise ValueError(
        "The model was created outside of `strategy.scope()`, and its optimizer within "
        "it. Move the call that creates the model, such as `keras.Sequential(...)`, "
        "`keras.Model(...)` or `keras.models.load_model(...)`, into "
        f"`with strategy.scope():`. Received: variable {variable.name}"
    )


def _watch_over(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Let this worker and the others end with the name of one that fails."""
    watch = Watch(
        strategy,
        functools.partial(background.count_background_collectives, strategy),
        functools.partial(background.pending_keys, strategy),
    )
    failures.report_uncaught_exceptions(strategy)
    interrupts.deliver_keyboard_interrupts()
    report_failed_variables(strategy)
    strategy._tf_dgc_initial_values = InitialValues(strategy, watch.waiting)
    strategy._tf_dgc_watch = watch
    watch.start()


def agree_while_tracing(
    strategy: tf.distribute.Strategy,
    describe: Callable[[], dict[str, Any]],
    otherwise: str,
    purpose: str,
) -> None:
    """Do what `meeting.agree` does, where workers may trace for long before they come.

    The watch notices who does not come, as in a collective.

    Args:
        strategy: strategy whose workers are compared.
        describe: function that returns what must be alike, as `meeting.agree`.
        otherwise: text of the error before the differences.
        purpose: purpose of that, the same text on all workers.

    Raises:
        ValueError: on every worker, if two descriptions differ.
        RuntimeError: if a worker does not come.
    """
    watch: Watch | None = getattr(strategy, "_tf_dgc_watch", None)
    if watch is not None:
        with watch.waiting(purpose):
            # The watch gives up before, and names who does not come.
            seconds = workers.tracing_timeout_seconds() + 2 * workers.timeout_seconds()
            consensus.require_equal(strategy, describe, otherwise, purpose, seconds)


def creating_zero_variables(
    strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which variables that start at zero need no comparison each.

    All workers have to create the same variables within.
    """
    values = getattr(strategy, "_tf_dgc_initial_values", None)
    return contextlib.nullcontext() if values is None else values.zeros_expected()


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
    if len(addresses) > 1 and is_in_a_cluster():
        return _made_before(communication_options)
    limit = workers.start_timeout_seconds()
    if resolver.cluster_spec() and me not in addresses:
        raise ValueError(_NO_WORKER + repr(resolver.task_type))
    if addresses and is_too_late_for_a_cluster():
        raise RuntimeError(_TOO_LATE)
    if len(addresses) > 1 and me in addresses:
        rendezvous.wait_for_all_workers(addresses, me, limit)
        configure_coordination(
            resolver.cluster_spec(), workers.heartbeat_timeout_seconds(), limit
        )
    with (
        _named(addresses, me, limit),
        enabling_collectives_by(
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
        silent = rendezvous.silent_workers(addresses, me)
        if not silent:
            raise
        # So that the others, who ask now, get an answer.
        time.sleep(rendezvous.ANSWER_SECONDS)
        failures.reported.set()
        atexit.register(failures.limit_teardown)
        raise rendezvous.missing_workers_error(
            addresses, me, silent, seconds
        ) from error
