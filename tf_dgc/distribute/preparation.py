"""What Keras 3 needs to train under a stock strategy, and we under Keras.

It acts on one strategy instance; no class or module is changed.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc._internals import mirrored
from tf_dgc.arguments import show
from tf_dgc.checkpoint import one_path
from tf_dgc.cluster import failures, meeting, tf_config, worker_interrupts, workers
from tf_dgc.cluster.watch import Watch
from tf_dgc.distribute import background, loss_scale
from tf_dgc.distribute.cross_device import SUPPORTED, cross_device_ops
from tf_dgc.distribute.initial_values import InitialValues, report_failed_variables
from tf_dgc.training.loops import TrainingLoops

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
        loops = TrainingLoops(strategy)
        if meeting.is_multi_worker(strategy):
            _watch_over(strategy)
            saving = functools.partial(one_path.mend_saving, strategy)
            loops.call_with_models(saving)
        loss_scale.mend(strategy)
        mirrored.allow_conditions(strategy)
        mirrored.check_updates(strategy, _refuse_update)
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
        functools.partial(background.count, strategy),
        functools.partial(background.pending_keys, strategy),
    )
    failures.tell_what_ends_this_worker(strategy)
    worker_interrupts.raise_in_time()
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
            meeting.agree(strategy, describe, otherwise, purpose, seconds)


def zeros_expected(
    strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which variables that start at zero need no comparison each.

    All workers have to create the same variables within.
    """
    values = getattr(strategy, "_tf_dgc_initial_values", None)
    return contextlib.nullcontext() if values is None else values.zeros_expected()
