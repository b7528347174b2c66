"""The background: what workers exchange while their steps go on.

Nothing of TensorFlow's stays under way between two calls of a function. So a step hands
what is to be exchanged to a thread, which calls a function of its own; its collectives
have keys and an order of their own (`in_lane`). A later step waits for it.
"""

import atexit
import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_dgc._internals import tf_collectives, tracing
from tf_dgc._internals.tf_collectives import Counters
from tf_dgc.collectives import cross_device
from tf_dgc.collectives.cross_device import CompressedCrossDeviceOps
from tf_dgc.multiworker import consensus, failures, workers
from tf_dgc.multiworker.positions import Group

_numbers = itertools.count(1)  # equal on all workers, as optimizers are


class BackgroundReduction:
    """Does one thing after the other, in the same order on all workers.

    Args:
        strategy: strategy of the workers, prepared.

    Attributes:
        number: number of its lane, the same on all workers.
        hook: hook of its collectives; None with one replica.
        work: function of a number and tensors of a replica, called in replica context,
            that does what was begun by that number.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self.number = next(_numbers)
        self.work: Callable[..., None] = _nothing
        self.hook: CompressedCrossDeviceOps | None = None
        if strategy.num_replicas_in_sync > 1:
            base = cross_device.cross_device_ops(strategy)
            self.hook = _in_lane(base, self.number)
        self._waits = Counters()  # of steps, for this
        self._met = False  # whether something else waits for this
        self._error = tf_collectives.local_variable("", tf.string)
        self._under_way = tf_collectives.local_variable(0, tf.int32)
        with tf.init_scope(), tf.device("CPU:0"):
            self._done = tf.queue.FIFOQueue(-1, [tf.bool], [[]])
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._left = 0  # tasks that have not ended
        self._thread: threading.Thread | None = None
        # At the end: the watch's threads may ask what is known here in any moment.
        _lanes(strategy)[self.number] = self

    # --- within a step --------------------------------------------------------------

    def check(self) -> tf.Operation | None:
        """Raise, when run, what has ended something in the background.

        Raises:
            ValueError: at once, where XLA compiles the step, which hands over nothing.
        """
        if tracing.in_xla_context():
            raise ValueError(
                "What is done in the background is handed to a thread, and XLA cannot "
                "compile that. Pass `jit_compile=False` to `Model.compile` and to "
                "`tf.function`, or use `delay=0`."
            )
        with tf.device("CPU:0"):
            text = self._error.read_value()
            return tf.debugging.Assert(tf.equal(text, ""), [text])

    def begin(self, number: int, values: Sequence[Any]) -> None:
        """Begin something; call it in cross-replica context.

        Args:
            number: number of it.
            values: tensors of each replica that `work` is called with.
        """
        self._start()
        rows = list(map(self._strategy.experimental_local_results, values))
        # TensorFlow keeps what it may call, and this is to end with its owner.
        put = functools.partial(_put, weakref.ref(self), number, len(rows[0]))
        with tf.device("CPU:0"):
            begun = self._under_way.assign_add(1, read_value=False)
            with tf.control_dependencies([] if begun is None else [begun]):
                tf.py_function(put, list(itertools.chain(*rows)), [])

    def wait(self) -> tf.Tensor:
        """Return something when what was begun has ended; in cross-replica context."""

        def wait() -> tf.Tensor:
            no_key = tf.constant(0)
            begun = self._waits.start(no_key, no_key)
            with tf.control_dependencies([begun]):
                ended = self._waits.finish(self._done.dequeue(), no_key)
            with tf.control_dependencies([ended]):
                left = self._under_way.assign_sub(1, read_value=False)
            with tf.control_dependencies([] if left is None else [left]):
                return tf.identity(ended)

        with tf.device("CPU:0"):
            ended = tf.cond(
                self._under_way > 0, wait, functools.partial(tf.constant, True)
            )
            with tf.control_dependencies([ended]):
                checked = self.check()
            with tf.control_dependencies([] if checked is None else [checked]):
                return tf.identity(ended)

    # --- outside of steps -----------------------------------------------------------

    def finish(self) -> None:
        """Wait until all that was begun has ended, also if no step ever waits for it.

        Raises:
            RuntimeError: if that ended with an error.
        """
        self._met = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._left == 0)
        finally:
            self._met = False
        text = self._error.read_value().numpy().decode()
        if text:
            raise RuntimeError(text)

    def forget(self) -> None:
        """Let no step wait for what was begun, and has ended."""
        for _ in range(int(self._done.size())):
            self._done.dequeue()
        self._under_way.assign(0)

    def count(self) -> dict[Group, list[int]]:
        """Return how many collectives were started and finished, by group.

        What nobody waits for counts as finished.
        """
        if self.hook is None:
            return {}
        started, finished = self._waits.read()
        waits = self._met or started > finished
        everyone = tuple(range(len(workers.all_names(self._strategy))))
        found: dict[Group, list[int]] = {}
        for group, (begun, done) in self.hook.count().items():
            pair = found.setdefault((-self.number, *(group or everyone)), [0, 0])
            pair[0] += begun
            pair[1] += done if waits else begun
        return found

    def pending_keys(self) -> dict[Group, int]:
        """Return the key of the collective that has started and not finished, or 0.

        By the group, as `count`.
        """
        if self.hook is None:
            return {}
        everyone = tuple(range(len(workers.all_names(self._strategy))))
        keys: dict[Group, int] = {}
        for group, key in self.hook.pending_keys().items():
            own = (-self.number, *(group or everyone))
            keys[own] = 0 if own in keys else key
        return keys

    # --- the thread -----------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            known = weakref.ref(self), self._tasks
            name = "tf_dgc in the background"
            self._thread = threading.Thread(
                target=_run, args=known, name=name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None).atexit = False
            atexit.register(_end, weakref.ref(self))

    def put(self, number: int, replicas: int, flat: Sequence[tf.Tensor]) -> None:
        """Let one thing be done; arguments are those of `do`."""
        with self._changed:
            self._left += 1
        self._tasks.put((number, replicas, flat))

    def do(self, number: int, replicas: int, flat: Sequence[tf.Tensor]) -> None:
        """Do one thing, and say that it has ended; in the thread.

        Args:
            number: number of it.
            replicas: number of local ones.
            flat: tensors of these, of each value one after the other.
        """
        try:
            if not self._error.read_value().numpy():
                with self._strategy.scope():
                    self._function(number, replicas, flat)
        except BaseException as error:
            self._fail(error)
        finally:
            self._done.enqueue(True)
            with self._changed:
                self._left -= 1
                self._changed.notify_all()

    @functools.cached_property
    def _function(self) -> Callable:
        def call(number: int, replicas: int, flat: Sequence[tf.Tensor]) -> None:
            places = range(0, len(flat), replicas)
            rows = [tf_collectives.per_replica(flat[i : i + replicas]) for i in places]
            work = functools.partial(self.work, number)
            self._strategy.run(work, args=tuple(rows))

        return tf.function(call, autograph=False)

    def _fail(self, error: BaseException) -> None:
        """Let the next step fail, and the other workers."""
        several = consensus.is_multi_worker(self._strategy)
        reason = None
        if several and isinstance(error, tf.errors.OpError):
            reason = failures.find_reason(self._strategy, str(error.message))
        if reason is None:
            kind, text = type(error).__name__, getattr(error, "message", error)
            reason = f"an exchange in the background ended with {kind}: {text}"
            if several:
                name = workers.full_name(
                    self._strategy, workers.own_name(self._strategy)
                )
                reason = f"in {name} {reason}"
        if several:
            failures.report_to_workers(reason)
        self._error.assign(f"tf_dgc: {reason}".replace("'", "`").replace('"', "`"))


def _nothing(*_: Any) -> None:
    """Do what nobody has asked for."""


def _put(lane: weakref.ref, number: int, replicas: int, *flat: tf.Tensor) -> None:
    owner = lane()
    if owner is not None:
        owner.put(number, replicas, flat)


def _run(lane: weakref.ref, tasks: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        owner = lane()
        if owner is None:
            return
        owner.do(*task)
        del owner, task


def _end(lane: weakref.ref) -> None:
    """Let what was begun end before this process does: the others wait for it."""
    owner = lane()
    if owner is not None and not failures.reported.is_set():
        try:
            owner.finish()
        except RuntimeError:
            return


def _in_lane(base: CompressedCrossDeviceOps, number: int) -> CompressedCrossDeviceOps:
    stock = tf_collectives.in_lane(base.collective_ops, number)
    return CompressedCrossDeviceOps(base.base, stock, number)


def _lanes(
    strategy: tf.distribute.Strategy,
) -> "weakref.WeakValueDictionary[int, BackgroundReduction]":
    """Return what is there of these, by number."""
    nothing: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
    return vars(strategy).setdefault("_tf_dgc_lanes", nothing)


def count_background_collectives(
    strategy: tf.distribute.Strategy,
) -> dict[Group, list[int]]:
    """Return how many collectives this worker has started and finished, by group.

    Args:
        strategy: strategy of several workers, prepared.
    """
    found = dict(cross_device.cross_device_ops(strategy).count())
    for lane in _living_lanes(strategy):
        found.update(lane.count())
    return found


def pending_keys(strategy: tf.distribute.Strategy) -> dict[Group, int]:
    """Return the key of the collective that this worker waits in, or 0, by group.

    Args:
        strategy: strategy of several workers, prepared.
    """
    keys = cross_device.cross_device_ops(strategy).pending_keys()
    for lane in _living_lanes(strategy):
        keys.update(lane.pending_keys())
    return keys


def _living_lanes(strategy: tf.distribute.Strategy) -> list[BackgroundReduction]:
    # One list at once: others may come while they are counted.
    lanes = [known() for known in _lanes(strategy).valuerefs()]
    return [lane for lane in lanes if lane is not None]
