"""The cross-device hook, and what Keras 3 needs to train under a stock strategy.

Both act on one strategy instance; no class or module is changed.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tf_dgc import _internals, cluster, failures
from tf_dgc.choice import Choice, choose
from tf_dgc.watch import Watch

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
        # Eager code runs the replicas one after the other, where a collective would
        # wait for ever; a function launches them together.
        self._exchange_in_graph = tf.function(self._exchange, reduce_retracing=True)

    def exchange(self, dense: Choice, vector: Any, words: Any) -> tuple[Any, Any]:
        """Sum a dense vector or gather sparse buffers: one collective, either way.

        Call it in cross-replica context.

        Args:
            dense: which of the two to do, the same on all replicas: a bool, or a
                (per-replica) scalar bool tensor.
            vector: per replica, float `[n]`; used if `dense`.
            words: per replica, int32 `[w]`, w equal on all; used unless `dense`.

        Returns:
            The sum of the vectors, `[n]`, and the gathered buffers, int32
            `[num_replicas * w]`, per replica; what was not exchanged is empty.
        """
        local = tf.distribute.get_strategy().experimental_local_results
        if not isinstance(dense, bool):
            dense = local(dense)[0]
        run = self._exchange
        if tf.executing_eagerly() and len(self._launchers) > 1:
            run = self._exchange_in_graph
        vectors, buffers = run(dense, local(vector), local(words))
        return _internals.per_replica(vectors), _internals.per_replica(buffers)

    @property
    def num_keys(self) -> int:
        """How many keys of collectives are in use; more steps need no more keys."""
        return len(_internals.kinds_of_collectives(self._collectives))

    def _exchange(self, dense: Choice, vectors: Any, words: Any) -> tuple[Any, Any]:
        def all_reduce() -> tuple[Any, Any]:
            return self._launch(_internals.launch_all_reduce, vectors), _empty(words)

        def gather() -> tuple[Any, Any]:
            return _empty(vectors), self._launch(_internals.launch_all_gather, words)

        return choose(dense, all_reduce, gather)

    def _launch(self, launch: Any, values: Any) -> tuple[tf.Tensor, ...]:
        with _internals.launch_lock(self._collectives):
            return tuple(map(launch, self._launchers, values))

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
        ValueError: for other kinds of strategy, or a `TF_CONFIG` that cannot be right.
    """
    cluster.check_tf_config(strategy)
    if strategy.num_replicas_in_sync > 1:
        cross_device_ops(strategy)
    multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    mended = getattr(strategy, "_tf_dgc_prepared", False)
    if not mended and isinstance(strategy, _SUPPORTED):
        strategy._tf_dgc_prepared = True
        if multi_worker:
            _mend_reduce(strategy)
        if cluster.is_multi_worker(strategy):
            _watch_over(strategy)
        _agree_on_overflow(strategy)
    return strategy


def _watch_over(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Let this worker and the others end with the name of one that fails."""
    watch = Watch(strategy, cross_device_ops(strategy).count)
    failures.name_in_training_loops(strategy)
    failures.tell_what_ends_this_worker(strategy)
    _report_failed_variables(strategy, watch)
    watch.start()


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


def _mend_reduce(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Make this instance accept the two calls of Keras 3 that TensorFlow refuses.

    See keras#20585. (a) `Trainer._maybe_symbolic_build` reduces a tuple of batches,
    of which it needs shapes and types only: give it the local ones, as batches may
    differ in size between workers. (b) `reduce_per_replica` passes `axis=0` with
    scalar metrics.
    """
    stock_reduce = strategy.reduce

    def reduce(reduce_op: Any, value: Any, axis: int | None) -> Any:
        if _internals.called_by_symbolic_build():
            return tf.nest.map_structure(
                lambda v: strategy.experimental_local_results(v)[0], value
            )
        if axis == 0 and _is_scalar(strategy.experimental_local_results(value)[0]):
            axis = None
        return stock_reduce(reduce_op, value, axis)

    strategy.reduce = reduce


def _report_failed_variables(
    strategy: tf.distribute.MultiWorkerMirroredStrategy, watch: Watch
) -> None:
    """Tell all workers why one could not create a variable.

    Creating a variable broadcasts its value. If models differ, TensorFlow names the
    difference on one worker, and the others hear only that it died.
    """

    def wrap(create: Callable) -> Callable:
        def create_variable(next_creator: Any, **kwargs: Any) -> Any:
            try:
                with failures.named(strategy), watch.waiting():
                    return create(next_creator, **kwargs)
            except tf.errors.OpError as error:
                name = kwargs.get("name") or "without a name"
                raise cluster.failure(
                    strategy,
                    f"could not create the variable {name}. Do all workers build the "
                    f"same model? TensorFlow says: {error.message}",
                ) from error

        return create_variable

    _internals.wrap_variable_creation(strategy, wrap)


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


def _is_scalar(value: Any) -> bool:
    return tf.is_tensor(value) and value.shape.rank == 0


def _empty(values: Any) -> tuple[tf.Tensor, ...]:
    return tuple(tf.zeros([0], v.dtype) for v in values)
