"""The cross-device hook, and what Keras 3 needs to train under a stock strategy.

Both act on one strategy instance; no class or module is changed.
"""

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import keras
import tensorflow as tf

from tf_dgc import (
    _internals,
    cluster,
    failures,
    keras_saving,
    pieces,
    worker_interrupts,
)
from tf_dgc.choice import Choice, choose
from tf_dgc.initial_values import InitialValues, report_failed_variables
from tf_dgc.loops import TrainingLoops
from tf_dgc.watch import Watch

Bounds: TypeAlias = tuple[int | None, int | None]
Strategy = TypeVar("Strategy", bound=tf.distribute.Strategy)

_SUPPORTED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


class CompressedCrossDeviceOps(tf.distribute.CrossDeviceOps):
    """A `tf.distribute.CrossDeviceOps` that also exchanges compressed payloads.

    `exchange` carries a whole step in one collective. Everything else (metrics,
    `strategy.reduce`, `strategy.gather`) falls through to the reduction that was there
    before.

    Args:
        base: the strategy's own `tf.distribute.CrossDeviceOps`.
        collective_ops: TensorFlow's `CollectiveAllReduce` for the same replicas,
            whose group and instance keys are used.

    Attributes:
        count: function that returns how many collectives of these replicas this worker
            has started and finished.
    """

    def __init__(self, base: tf.distribute.CrossDeviceOps, collective_ops: Any):
        super().__init__()
        self.base = base
        self._collectives = collective_ops
        self._launchers = _internals.launchers(collective_ops)
        self.count = _internals.reuse_collective_keys(collective_ops)
        _internals.wrap_launches(collective_ops, pieces.all_reduce, pieces.all_gather)

    def exchange(
        self, dense: Choice, vector: Any, words: Any, bounds: Bounds = (None, None)
    ) -> tuple[Any, Any]:
        """Sum a dense vector or gather sparse buffers.

        Either is one collective, or one per piece of what is large (`pieces.py`). Call
        it in cross-replica context.

        Args:
            dense: which of the two to do, the same on all replicas: a bool, or a
                (per-replica) scalar bool tensor.
            vector: per replica, float `[n]`; used if `dense`.
            words: per replica, int32 `[w]`, w equal on all; used unless `dense`.
            bounds: the most bytes of either, about, where the graph computes its shape;
                without a bound it goes whole then.

        Returns:
            The sum of the vectors, `[n]`, and the gathered buffers, int32
            `[num_replicas * w]`, per replica; what was not exchanged is empty.
        """
        local = tf.distribute.get_strategy().experimental_local_results
        if not isinstance(dense, bool):
            dense = local(dense)[0]
        vectors, buffers = self._exchange(dense, local(vector), local(words), bounds)
        return _internals.per_replica(vectors), _internals.per_replica(buffers)

    def abort_message(self, seconds: float) -> str:
        """Return why all collectives of this worker fail, if they do.

        Ask when training cannot go on anyway: see `_internals.abort_message`.
        """
        return _internals.abort_message(self._collectives, seconds)

    @property
    def num_keys(self) -> int:
        """How many keys of collectives are in use; more steps need no more keys."""
        return len(_internals.kinds_of_collectives(self._collectives))

    def _exchange(
        self, dense: Choice, vectors: Any, words: Any, bounds: Bounds
    ) -> tuple[Any, Any]:
        def all_reduce(launcher: Any, vector: tf.Tensor) -> tf.Tensor:
            launch = functools.partial(_internals.launch_all_reduce, launcher)
            if bounds[0] is None or vector.shape.is_fully_defined():
                return launch(vector)
            return pieces.all_reduce_about(launch, vector, bounds[0])

        def gather(launcher: Any, buffer: tf.Tensor) -> tf.Tensor:
            launch = functools.partial(_internals.launch_all_gather, launcher)
            if bounds[1] is None or buffer.shape.is_fully_defined():
                return launch(buffer)
            num_replicas = _internals.group_size(launcher)
            return pieces.all_gather_at_most(launch, buffer, num_replicas, bounds[1])

        return choose(
            dense,
            lambda: (self._launch(all_reduce, vectors), _empty(words)),
            lambda: (_empty(vectors), self._launch(gather, words)),
        )

    def _launch(self, launch: Any, values: Any) -> tuple[tf.Tensor, ...]:
        with _internals.launch_lock(self._collectives):
            if not tf.executing_eagerly() or len(self._launchers) == 1:
                return tuple(map(launch, self._launchers, values))
            # Eager code would wait in the first one for the others for ever.
            with ThreadPoolExecutor(len(self._launchers)) as threads:
                return tuple(threads.map(launch, self._launchers, values))

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Fall through to the strategy's own reduction."""
        return self.base.reduce(*args, **kwargs)

    def batch_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Fall through to the strategy's own reduction."""
        return self.base.batch_reduce(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """Fall through to the strategy's own broadcast."""
        return self.base.broadcast(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        # The seams that TensorFlow calls under private names (`_all_reduce`,
        # `_gather`, `_num_between_graph_workers`, ...) are defined by the base class,
        # so `__getattr__` alone would never see them.
        if name in _FALL_THROUGH:
            return getattr(self.base, name)
        return super().__getattribute__(name)


_FALL_THROUGH = frozenset(
    name
    for name in vars(tf.distribute.CrossDeviceOps)
    if name.startswith("_") and not name.startswith("__")
) - {"_canonicalize_devices"}


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
    longer, `TF_DGC_TRACING_TIMEOUT` (1200).

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
            f"Received: strategy={strategy!r}"
        )
    cluster.check_tf_config(strategy)
    if strategy.num_replicas_in_sync > 1:
        cross_device_ops(strategy)
    mended = getattr(strategy, "_tf_dgc_prepared", False)
    if not mended and isinstance(strategy, _SUPPORTED):
        strategy._tf_dgc_prepared = True
        TrainingLoops(strategy)
        if cluster.is_multi_worker(strategy):
            _watch_over(strategy)
        _agree_on_overflow(strategy)
    return strategy


def _watch_over(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Let this worker and the others end with the name of one that fails."""
    watch = Watch(strategy, cross_device_ops(strategy).count)
    failures.tell_what_ends_this_worker(strategy)
    worker_interrupts.raise_in_time()
    keras_saving.mend_saving(strategy)
    report_failed_variables(strategy)
    strategy._tf_dgc_initial_values = InitialValues(strategy, watch.waiting)
    watch.start()


def zeros_expected(
    strategy: tf.distribute.Strategy,
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which variables that start at zero need no comparison each.

    All workers have to create the same variables within.
    """
    values = getattr(strategy, "_tf_dgc_initial_values", None)
    return contextlib.nullcontext() if values is None else values.zeros_expected()


def cross_device_ops(strategy: tf.distribute.Strategy) -> CompressedCrossDeviceOps:
    """Return the hook of this strategy, installing it at the first call."""
    if not isinstance(strategy, _SUPPORTED):
        raise ValueError(
            "tf_dgc trains under no strategy, `tf.distribute.MirroredStrategy` or "
            "`tf.distribute.MultiWorkerMirroredStrategy`. "
            f"Received: strategy={strategy!r}"
        )
    current = _internals.get_cross_device_ops(strategy)
    if isinstance(current, CompressedCrossDeviceOps):
        return current
    collective_ops = _internals.collective_ops_of(strategy)
    if collective_ops is None:
        raise ValueError(
            "This strategy mixes kinds of devices, for which TensorFlow has no "
            "collectives. Use devices of one kind. "
            f"Received: devices={strategy.extended.worker_devices}"
        )
    hook = CompressedCrossDeviceOps(current, collective_ops)
    _internals.set_cross_device_ops(strategy, hook)
    return hook


def _agree_on_overflow(strategy: Strategy) -> None:
    """Make all replicas skip a step if the gradients of one overflowed.

    `LossScaleOptimizer` asks every replica whether its gradients are finite and goes by
    the first one's answer, as if they had been summed before. Elsewhere an overflow
    then gets into all weights, and where processes differ, one skips the step while
    the others wait for it.
    """
    stock_call = strategy.extended.call_for_each_replica

    def call_for_each_replica(
        fn: Callable, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_check_of_gradients(fn):
            fn = _true_everywhere(fn)
        return stock_call(fn, args, kwargs)

    strategy.extended.call_for_each_replica = call_for_each_replica


def _is_check_of_gradients(fn: Any) -> bool:
    owner = getattr(fn, "__self__", None)
    scales = isinstance(owner, keras.optimizers.LossScaleOptimizer)
    return scales and fn.__name__ == "check_finite"


def _true_everywhere(check: Callable) -> Callable:
    def check_everywhere(*args: Any) -> tf.Tensor:
        fails = tf.cast(tf.logical_not(check(*args)), tf.float32)
        context = tf.distribute.get_replica_context()
        return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, fails), 0.0)

    return check_everywhere


def _empty(values: Any) -> tuple[tf.Tensor, ...]:
    return tuple(tf.zeros([0], v.dtype) for v in values)
