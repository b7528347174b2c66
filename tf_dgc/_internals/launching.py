"""Private names of TensorFlow's launcher of collectives, its keys and its order."""

import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import (
    cross_device_ops,
)
from tensorflow.python.ops import resource_variable_ops

CollectiveAllReduce = cross_device_ops.CollectiveAllReduce


def launchers(collective_ops: Any) -> list[Any]:
    """Return one `CollectiveReplicaLauncher` per local replica."""
    return collective_ops._launchers


def group_size(launcher: Any) -> int:
    """Return how many replicas, of all workers, a launcher's collectives have."""
    return launcher._group_size


def launch_lock(collective_ops: Any) -> Any:
    """Return the lock under which TensorFlow launches its own collectives."""
    return collective_ops._lock


def launch_all_gather(launcher: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Launch one `CollectiveGatherV2` (`CollectiveReplicaLauncher._all_gather`)."""
    return launcher._all_gather(tensor, None)


def launch_all_reduce(launcher: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Launch one `CollectiveReduceV2` that sums."""
    return launcher.all_reduce(tensor)


def abort_message(collective_ops: Any, seconds: float) -> str:
    """Return why TensorFlow ends the collectives of this worker, or "" if it does not.

    The first reason stays, whatever fails later, and every collective fails with it.
    One that does not fail is given up after so many seconds, and ends all others.
    """
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds)
    found = []

    def launch() -> None:
        try:
            launchers(collective_ops)[0].all_reduce(tf.zeros([]), options=options)
        except tf.errors.OpError as error:
            found.append(str(error.message))

    # A thread, as the time-out of a collective is TensorFlow's own.
    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    thread.join(2 * seconds)
    return "".join(found)


def reuse_collective_keys(collective_ops: Any) -> "Counters":
    """Give collectives of one kind, dtype and shape the same key, again and again.

    TensorFlow hands a new key to every execution (`_next_instance_key`) and never
    forgets one: each costs memory for as long as the process lives, and the workers a
    round trip to the first of them. It does so when Python calls a function
    (`FuncGraph.capture_call_time_value`), which fails for a function called within a
    `tf.while_loop`, as Keras's `steps_per_execution` does.

    A key that follows from the tensor is the same on all workers, whenever each of
    them traces. A launcher's collectives are one after the other (`_ordering_token`),
    so no key is in use when it is used again.

    Returns:
        Counters of the collectives that this worker has started and finished so far.
    """
    counters = [_count_collectives(launcher) for launcher in launchers(collective_ops)]
    return counters[0]  # all local replicas go through the same ones


class Counters:
    """How many collectives of one launcher were started and finished, and which waits.

    All are one variable, so none counts as started before the one ahead has finished,
    though its tensor may be there: what is waited for is always the last one started.
    The third number is the key of the collective that has started and not finished: a
    start adds the key, its end subtracts it again.
    """

    def __init__(self) -> None:
        self._counts = local_variable([0, 0, 0], tf.int64)

    def read(self) -> list[int]:
        """Return both numbers; any thread may call it, at any time."""
        return [int(count) for count in self._counts.read_value().numpy()[:2]]

    def pending_key(self) -> int:
        """Return the key of the collective that has started and not finished, or 0.

        A collective that an error ended never finishes: its key stays in the sum. Any
        thread may call this, at any time.
        """
        return int(self._counts.read_value().numpy()[2])

    def start(self, tensor: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Return the key when the tensor is there and its collective is counted.

        Args:
            tensor: tensor that is handed over.
            key: key of the collective, scalar int32.
        """
        return self._after(tensor, 1, 0, key, key)

    def finish(self, result: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Return the result when it is there and counted.

        Args:
            result: result of the collective.
            key: key that `start` was given.
        """
        return self._after(result, 0, 1, -key, result)

    def _after(
        self,
        tensor: tf.Tensor,
        started: int,
        finished: int,
        key: tf.Tensor,
        value: tf.Tensor,
    ) -> tf.Tensor:
        """Return `value` when a tensor was there and it was counted."""
        number = tf.get_static_value(key)
        with tf.control_dependencies([tensor]), tf.device("CPU:0"):
            if number is None:  # the shape is known at run time
                more = tf.stack([started, finished, tf.cast(key, tf.int64)])
            else:
                more = [started, finished, int(number)]
            done = self._counts.assign_add(more, read_value=False)
        with tf.control_dependencies([] if done is None else [done]):
            return tf.identity(value)


class Launch(NamedTuple):
    """A collective, as it was traced.

    Attributes:
        kind: name of its kind, such as "all_reduce".
        dtype: name of the dtype of its tensor.
        shape: shape of its tensor, as text.
        places: places where it was traced, each a file, a line and a function, the
            innermost first; none of what was executed eagerly.
    """

    kind: str
    dtype: str
    shape: str
    places: Sequence[tuple[str, int, str]]


_launches: dict[int, Launch] = {}  # by key, of all launchers


def launch_of(key: int) -> Launch | None:
    """Return the collective with this key; None if its shape was known at run time.

    Of several that share a key, the one that was traced last.
    """
    return _launches.get(key)


def remember_launch(kind: str, tensor: tf.Tensor, key: tf.Tensor) -> None:
    """Remember what a key stands for, for `launch_of`.

    Python calls this when a step is traced, not when it runs; in eager code only the
    first time does something.

    Args:
        kind: name of the kind of collective.
        tensor: tensor that is handed over.
        key: key that `collective_key` returned for both.
    """
    number = tf.get_static_value(key)
    if number is None or (tf.executing_eagerly() and int(number) in _launches):
        return
    stack = () if tf.executing_eagerly() else tuple(reversed(key.op.traceback))
    places = tuple((f.filename, f.lineno, f.name) for f in stack)
    _launches[int(number)] = Launch(kind, tensor.dtype.name, str(tensor.shape), places)


def local_variable(value: Any, dtype: tf.DType) -> tf.Variable:
    """Return a variable of this process, which no strategy distributes."""
    with tf.init_scope(), tf.device("CPU:0"):
        return resource_variable_ops.ResourceVariable(
            value, trainable=False, dtype=dtype
        )


def _count_collectives(launcher: Any) -> Counters:
    """Count what one launcher starts and finishes, and let it use keys again."""
    counters = Counters()

    def counted(kind: str) -> Callable:
        launch = getattr(launcher, kind)

        def launch_and_count(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
            tensor = tf.convert_to_tensor(tensor)
            launcher._tf_dgc_kinds.add((kind, tensor.dtype.name, str(tensor.shape)))
            key = collective_key(kind, tensor)
            remember_launch(kind.removeprefix("_"), tensor, key)
            launcher._next_instance_key = lambda: counters.start(tensor, key)
            return counters.finish(launch(tensor, *args, **kwargs), key)

        return launch_and_count

    launcher._tf_dgc_kinds = set()
    for kind in ("all_reduce", "_all_gather"):
        setattr(launcher, kind, counted(kind))
    return counters


def wrap_launches(
    collective_ops: Any, all_reduce: Callable[..., Any], all_gather: Callable[..., Any]
) -> None:
    """Launch every collective between processors by these functions.

    Not between GPUs, which have connections of their own (`_device`).

    Args:
        collective_ops: TensorFlow's `CollectiveAllReduce` of the strategy.
        all_reduce: function of the function that launches one collective, and the
            tensor; returns the sum.
        all_gather: function of both, and the number of replicas (`_group_size`);
            returns the concatenation.
    """
    for launcher in launchers(collective_ops):
        if "GPU" not in launcher._device:
            _wrap_launches(launcher, all_reduce, all_gather)


def _wrap_launches(launcher: Any, all_reduce: Callable, all_gather: Callable) -> None:
    reduce_one, gather_one = launcher.all_reduce, launcher._all_gather

    def reduce(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        launch = functools.partial(_launch, reduce_one, args, kwargs)
        return all_reduce(launch, tf.convert_to_tensor(tensor))

    def gather(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        launch = functools.partial(_launch, gather_one, args, kwargs)
        return all_gather(launch, tf.convert_to_tensor(tensor), launcher._group_size)

    launcher.all_reduce, launcher._all_gather = reduce, gather


def _launch(one: Callable, args: Any, kwargs: Any, tensor: tf.Tensor) -> tf.Tensor:
    return one(tensor, *args, **kwargs)


def kinds_of_collectives(collective_ops: Any) -> set[tuple]:
    """Return kind, dtype and shape of all collectives so far, which have a key each."""
    return set().union(*(x._tf_dgc_kinds for x in launchers(collective_ops)))


def collective_key(kind: str, tensor: tf.Tensor) -> tf.Tensor:
    """Return the key of a collective, scalar int32.

    It is a hash. Should two kinds of tensors of a model get the same, at a chance of
    one in 10^9, TensorFlow refuses the second.

    Args:
        kind: name of the kind of collective, such as "broadcast".
        tensor: tensor that is handed over; equal in dtype and shape on all workers,
            whether the shape is known while tracing or not.
    """
    name = zlib.crc32(f"{kind} {tensor.dtype.name}".encode())
    with tf.device("CPU:0"):
        if tensor.shape.is_fully_defined():
            lengths = np.array(tensor.shape.as_list(), np.int64)
            terms = (lengths + 1) % _NUM_KEYS * _FACTORS[: len(lengths)] % _NUM_KEYS
            key = _FIRST_KEY + (name + int(np.sum(terms))) % _NUM_KEYS
            return tf.constant(key, tf.int32)
        shape = tf.shape(tensor, tf.int64)
        factors = tf.constant(_FACTORS)[: tf.size(shape)]
        terms = (shape + 1) % _NUM_KEYS * factors % _NUM_KEYS
        key = _FIRST_KEY + (name + tf.reduce_sum(terms)) % _NUM_KEYS
        return tf.cast(key, tf.int32)


# Above the keys that TensorFlow hands out itself, to create variables, and below 2**31.
_FIRST_KEY = 1_000_000_000
_NUM_KEYS = 1_000_000_007  # a prime
_FACTORS = np.array([pow(1_000_003, i, _NUM_KEYS) for i in range(1, 17)], np.int64)
