"""Background reductions: exchanges that continue while the steps go on.

TensorFlow finishes all work of a function before the call returns. So a step hands its
exchange to a thread, which calls a function of its own. The thread's collectives have
their own keys and order, a *lane*. A later step waits for the result.
"""

import atexit
import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_dgc._internals import tf_collectives, tracing
from tf_dgc._internals.tf_collectives import Counters
from tf_dgc.multiworker import consensus, cross_device, failures, workers
from tf_dgc.multiworker.cross_device import WorkerCrossDeviceOps
from tf_dgc.multiworker.positions import Group

_Task: TypeAlias = tuple[int, int, Sequence[tf.Tensor]]
"""Arguments of `BackgroundReduction.do`."""

_numbers = itertools.count(1)  # the same on all workers, as optimizers are


class BackgroundReduction:
    """Runs tasks in a thread, one at a time, in the same order on all workers.

    Args:
        strategy: strategy of the workers, prepared.

    Attributes:
        number: number of its lane, the same on all workers.
        hook: cross-device operations of the lane; None with one replica.
        work: function that runs a task, called in replica context with the task's
            number and the replica's tensors.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self.number = next(_numbers)
        self.work: Callable[..., None] = _do_nothing
        self.hook: WorkerCrossDeviceOps | None = None
        if strategy.num_replicas_in_sync > 1:
            base = cross_device.cross_device_ops(strategy)
            lane = tf_collectives.in_lane(base.collective_ops, self.number)
            self.hook = cross_device.create_hook(base.base, lane, self.number)
        self._waits = Counters()  # of steps that wait for this
        self._met = False  # whether `finish` waits for this
        self._error = tf_collectives.local_variable("", tf.string)
        self._under_way = tf_collectives.local_variable(0, tf.int32)
        with tf.init_scope(), tf.device("CPU:0"):
            self._done = tf.queue.FIFOQueue(-1, [tf.bool], [[]])
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._functions: dict[tuple[Any, ...], Callable[..., None]] = {}
        # Last: the watch's threads may call `count` as soon as this is registered.
        _instances(strategy)[self.number] = self

    # Called within a step

    def check(self) -> tf.Operation | None:
        """Raise, at run time, the error that ended a task.

        Raises:
            ValueError: immediately, if XLA compiles the step.
        """
        if tracing.in_xla_context():
            raise ValueError(
                "With a `delay` workers exchange in a background thread, which XLA "
                "cannot compile. Pass `jit_compile=False` to `Model.compile` and to "
                "`tf.function`, or use `delay=0`."
            )
        with tf.device("CPU:0"):
            text = self._error.read_value()
            return tf.debugging.Assert(tf.equal(text, ""), [text])

    def begin(self, number: int, values: Sequence[Any]) -> None:
        """Begin a task; call it in cross-replica context.

        Args:
            number: number of the task.
            values: tensors of each replica, which are passed to `work`.
        """
        self._start_thread()
        rows = list(map(self._strategy.experimental_local_results, values))
        # A weak reference: TensorFlow keeps the function longer than this may live.
        put = functools.partial(_put, weakref.ref(self), number, len(rows[0]))
        with tf.device("CPU:0"):
            begun = self._under_way.assign_add(1, read_value=False)
            with tf.control_dependencies([] if begun is None else [begun]):
                tf.py_function(put, list(itertools.chain(*rows)), [])

    def wait(self) -> tf.Tensor:
        """Wait for one task that has begun, if any; call it in cross-replica context.

        Returns:
            A tensor that is available when the task has ended.
        """

        def wait() -> tf.Tensor:
            no_key = tf.constant(0)
            begun = self._waits.start(no_key, no_key)
            with tf.control_dependencies([begun]):
                ended = self._waits.finish(self._done.dequeue(), no_key)
            with tf.control_dependencies([ended]):
                counted = self._under_way.assign_sub(1, read_value=False)
            with tf.control_dependencies([] if counted is None else [counted]):
                return tf.identity(ended)

        with tf.device("CPU:0"):
            ended = tf.cond(self._under_way > 0, wait, lambda: tf.constant(True))
            with tf.control_dependencies([ended]):
                checked = self.check()
            with tf.control_dependencies([] if checked is None else [checked]):
                return tf.identity(ended)

    # Called outside of steps

    def finish(self) -> None:
        """Wait until all tasks have ended, including those that no step waits for.

        Raises:
            RuntimeError: if a task ended with an error.
        """
        self._met = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._unfinished == 0)
        finally:
            self._met = False
        with tf.init_scope():  # TensorFlow looks up attributes while `fit` is traced
            text = self._error.read_value().numpy().decode()
        if text:
            raise RuntimeError(text)

    def forget(self) -> None:
        """Discard finished tasks, so that no step waits for them."""
        with tf.init_scope():
            for _ in range(int(self._done.size())):
                self._done.dequeue()
            self._under_way.assign(0)

    def count(self) -> dict[Group, list[int]]:
        """Return the numbers of started and finished collectives, by worker group.

        All started collectives count as finished while nothing waits for this.
        """
        if self.hook is None:
            return {}
        started, finished = self._waits.read()
        is_awaited = self._met or started > finished
        counts: dict[Group, list[int]] = {}
        for group, (begun, done) in self.hook.count().items():
            pair = counts.setdefault(self._lane_group(group), [0, 0])
            pair[0] += begun
            pair[1] += done if is_awaited else begun
        return counts

    def pending_keys(self) -> dict[Group, int]:
        """Return the key of the unfinished collective, or 0, by group as `count`."""
        if self.hook is None:
            return {}
        keys: dict[Group, int] = {}
        for group, key in self.hook.pending_keys().items():
            lane_group = self._lane_group(group)
            keys[lane_group] = 0 if lane_group in keys else key
        return keys

    def _lane_group(self, group: Group) -> Group:
        """Return a group of the lane: its negative number, then the workers."""
        all_workers = tuple(range(len(workers.all_names(self._strategy))))
        return (-self.number, *(group or all_workers))

    # The thread

    def put(self, number: int, replicas: int, flat: Sequence[tf.Tensor]) -> None:
        """Enqueue a task; the arguments are those of `do`."""
        with self._changed:
            self._unfinished += 1
        self._tasks.put((number, replicas, flat))

    def do(self, number: int, replicas: int, flat: Sequence[tf.Tensor]) -> None:
        """Run a task and signal its end; called in the thread.

        Args:
            number: number of the task.
            replicas: number of local replicas.
            flat: tensors of all local replicas, value by value.
        """
        try:
            if not self._error.read_value().numpy():
                with self._strategy.scope():
                    self._trace(number, replicas, flat)(*flat)
        except BaseException as error:
            self._fail(error)
        finally:
            self._done.enqueue(True)
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(self), self._tasks),
            name="tf_dgc in the background",
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None).atexit = False
        atexit.register(_finish_at_exit, weakref.ref(self))

    def _trace(
        self, number: int, replicas: int, flat: Sequence[tf.Tensor]
    ) -> Callable[..., None]:
        """Return the function that runs a task, traced once per number and shapes."""

        def call(*flat: tf.Tensor) -> None:
            starts = range(0, len(flat), replicas)
            rows = [tf_collectives.per_replica(flat[i : i + replicas]) for i in starts]
            work = functools.partial(self.work, number)
            self._strategy.run(work, args=tuple(rows))

        specs = [tf.TensorSpec(value.shape, value.dtype) for value in flat]
        key = (number, *specs)
        if key not in self._functions:
            # A concrete function: TensorFlow would warn about retracing one function
            # for several numbers.
            function = tf.function(call, autograph=False)
            self._functions[key] = function.get_concrete_function(*specs)
        return self._functions[key]

    def _fail(self, error: BaseException) -> None:
        """Make the next step fail, and the other workers."""
        is_multi_worker = consensus.is_multi_worker(self._strategy)
        reason = None
        if is_multi_worker and isinstance(error, tf.errors.OpError):
            reason = failures.find_reason(self._strategy, str(error.message))
        if reason is None:
            kind, text = type(error).__name__, getattr(error, "message", error)
            reason = f"an exchange in the background ended with {kind}: {text}"
            if is_multi_worker:
                name = workers.full_name(
                    self._strategy, workers.own_name(self._strategy)
                )
                reason = f"in {name} {reason}"
        if is_multi_worker:
            failures.report_to_workers(reason)
        self._error.assign(f"tf_dgc: {reason}".replace("'", "`").replace('"', "`"))


def count_background_collectives(
    strategy: tf.distribute.Strategy,
) -> dict[Group, list[int]]:
    """Return the numbers of started and finished collectives, by worker group.

    Includes the steps' own collectives.
    """
    counts = dict(cross_device.cross_device_ops(strategy).count())
    for reduction in _living_instances(strategy):
        counts.update(reduction.count())
    return counts


def pending_keys(strategy: tf.distribute.Strategy) -> dict[Group, int]:
    """Return the key of this worker's unfinished collective, or 0, by worker group."""
    keys = cross_device.cross_device_ops(strategy).pending_keys()
    for reduction in _living_instances(strategy):
        keys.update(reduction.pending_keys())
    return keys


def _do_nothing(*_: Any) -> None:
    pass


_Reference: TypeAlias = "weakref.ref[BackgroundReduction]"


def _put(reference: _Reference, number: int, replicas: int, *flat: tf.Tensor) -> None:
    reduction = reference()
    if reduction is not None:
        reduction.put(number, replicas, flat)


def _run(reference: _Reference, tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        reduction = reference()
        if reduction is None:
            return
        reduction.do(*task)
        del reduction, task


def _finish_at_exit(reference: _Reference) -> None:
    """Finish all tasks before the process exits: other workers wait for them."""
    reduction = reference()
    if reduction is not None and not failures.reported.is_set():
        try:
            reduction.finish()
        except RuntimeError:
            return


_Instances: TypeAlias = "weakref.WeakValueDictionary[int, BackgroundReduction]"


def _instances(strategy: tf.distribute.Strategy) -> _Instances:
    """Return the strategy's background reductions, by number."""
    empty: _Instances = weakref.WeakValueDictionary()
    instances: _Instances = vars(strategy).setdefault("_tf_dgc_lanes", empty)
    return instances


def _living_instances(strategy: tf.distribute.Strategy) -> list[BackgroundReduction]:
    # A list at once: other threads may add instances while these are counted.
    instances = [reference() for reference in _instances(strategy).valuerefs()]
    return [instance for instance in instances if instance is not None]
