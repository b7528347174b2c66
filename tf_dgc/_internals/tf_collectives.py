"""Private names of TensorFlow's collectives and strategies."""

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import (
    cross_device_ops,
    cross_device_utils,
    device_util,
    distribute_lib,
    distribute_utils,
    mirrored_run,
    values,
)
from tensorflow.python.ops import (
    collective_ops,
    control_flow_v2_func_graphs,
    resource_variable_ops,
)
from tensorflow.python.trackable import base

CollectiveAllReduce = cross_device_ops.CollectiveAllReduce


def launchers(collective_ops: Any) -> list[Any]:
    """Return one `CollectiveReplicaLauncher` per local replica."""
    return collective_ops._launchers


def group_size(launcher: Any) -> int:
    """Return the number of replicas, of all workers, in a launcher's collectives."""
    return launcher._group_size


def launch_lock(collective_ops: Any) -> Any:
    """Return the lock under which TensorFlow launches its own collectives."""
    return collective_ops._lock


def launch_all_gather(launcher: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Launch one `CollectiveGatherV2` (`CollectiveReplicaLauncher._all_gather`)."""
    return launcher._all_gather(tensor, None)


def launch_all_reduce(launcher: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Launch one `CollectiveReduceV2` that sums."""
    wider = _SUMMED_ON_GPUS.get(tensor.dtype)
    if wider is not None and "GPU" in launcher._device.upper():
        total = launcher.all_reduce(tf.cast(tensor, wider))
        return tf.cast(total, tensor.dtype)
    return launcher.all_reduce(tensor)


# On GPUs, TensorFlow sums neither int32 nor bfloat16
# (`BaseCollectiveExecutor::CreateCollective`).
_SUMMED_ON_GPUS = {tf.int32: tf.int64, tf.bfloat16: tf.float32}


def abort_message(collective_ops: Any, seconds: float) -> str:
    """Return why TensorFlow has ended the collectives of this worker, or ""."""
    # TensorFlow keeps the first reason, and every later collective fails with it. This
    # launches one; if it does not fail, it times out, which ends all others.
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds)
    messages = []

    def launch() -> None:
        try:
            launchers(collective_ops)[0].all_reduce(tf.zeros([]), options=options)
        except tf.errors.OpError as error:
            messages.append(str(error.message))

    # A thread, because the timeout of a collective is up to TensorFlow.
    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    thread.join(2 * seconds)
    return "".join(messages)


def reuse_collective_keys(collective_ops: Any) -> "Counters":
    """Reuse one key for collectives of the same kind, dtype and shape; count them."""
    # TensorFlow gives every execution a new key (`_next_instance_key`) and never frees
    # it: each costs memory, and a round trip to the first worker. It does so when
    # Python calls a function (`FuncGraph.capture_call_time_value`), which fails within
    # `tf.while_loop`, as in Keras's `steps_per_execution`. A key derived from the
    # tensor is the same on all workers, whenever each traces. A launcher's collectives
    # run one after the other (`_ordering_token`), so no key is in use when it is
    # reused.
    counters = [_count_collectives(launcher) for launcher in launchers(collective_ops)]
    return counters[0]  # all local replicas take part in the same collectives


class Counters:
    """Number of a launcher's collectives that started and finished; pending key."""

    # All three are in one variable, so a collective counts as started only when the
    # previous one has finished. Its start adds its key to the third number, its end
    # subtracts it.

    def __init__(self) -> None:
        self._counts = local_variable([0, 0, 0], tf.int64)

    def read(self) -> list[int]:
        """Return the numbers of starts and ends; any thread may call this."""
        return [int(count) for count in self._counts.read_value().numpy()[:2]]

    def pending_key(self) -> int:
        """Return the key of the collective that has started and not finished, or 0."""
        # A collective that an error ended never finishes: its key stays in the sum. Any
        # thread may call this at any time.
        return int(self._counts.read_value().numpy()[2])

    def start(self, tensor: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Return the key after the tensor is available and the start is counted."""
        return self._after(tensor, 1, 0, key, key)

    def finish(self, result: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Return the result after it is available and the end is counted."""
        return self._after(result, 0, 1, -key, result)

    def _after(
        self,
        tensor: tf.Tensor,
        started: int,
        finished: int,
        key: tf.Tensor,
        value: tf.Tensor,
    ) -> tf.Tensor:
        """Return `value` after a tensor is available and the counts are updated."""
        number = tf.get_static_value(key)
        with tf.control_dependencies([tensor]), tf.device("CPU:0"):
            if number is None:  # the shape is known at run time
                increment = tf.stack([started, finished, tf.cast(key, tf.int64)])
            else:
                increment = [started, finished, int(number)]
            done = self._counts.assign_add(increment, read_value=False)
        with tf.control_dependencies([] if done is None else [done]):
            return tf.identity(value)


class TracedCollective(NamedTuple):
    """A collective that was traced."""

    kind: str  # name of its kind, such as "all_reduce"
    dtype: str  # name of the dtype of its tensor
    shape: str  # shape of its tensor, as text
    places: Sequence[tuple[str, int, str]]  # file, line, function; innermost first


_traced_collectives: dict[int, TracedCollective] = {}  # by key, of all launchers


def find_collective(key: int) -> TracedCollective | None:
    """Return the collective with this key; None if its shape was known at run time."""
    return _traced_collectives.get(key)


def record_collective(kind: str, tensor: tf.Tensor, key: tf.Tensor) -> None:
    """Store what a key belongs to, when a step is traced, for `find_collective`."""
    number = tf.get_static_value(key)
    if number is None or (
        tf.executing_eagerly() and int(number) in _traced_collectives
    ):
        return
    stack = () if tf.executing_eagerly() else tuple(reversed(key.op.traceback))
    places = tuple((f.filename, f.lineno, f.name) for f in stack)
    _traced_collectives[int(number)] = TracedCollective(
        kind, tensor.dtype.name, str(tensor.shape), places
    )


def local_variable(value: Any, dtype: tf.DType, device: str = "CPU:0") -> tf.Variable:
    """Return a variable of this process, which no strategy distributes."""
    with tf.init_scope(), tf.device(device):
        return resource_variable_ops.ResourceVariable(
            value, trainable=False, dtype=dtype
        )


def _count_collectives(launcher: Any) -> Counters:
    """Count the collectives of one launcher, and make it reuse keys."""
    counters = Counters()

    def counted(kind: str) -> Callable:
        launch = getattr(launcher, kind)

        def launch_and_count(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
            tensor = tf.convert_to_tensor(tensor)
            launcher._tf_dgc_kinds.add((kind, tensor.dtype.name, str(tensor.shape)))
            key = collective_key(kind, tensor)
            record_collective(kind.removeprefix("_"), tensor, key)
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
    """Launch every collective between CPUs by these functions."""
    # Those between GPUs, which have connections of their own, are not changed. Both get
    # a function that launches one collective, and a tensor; `all_gather` also the
    # number of replicas.
    for launcher in launchers(collective_ops):
        if "GPU" not in launcher._device:
            _wrap_launches(launcher, all_reduce, all_gather)


def _wrap_launches(launcher: Any, all_reduce: Callable, all_gather: Callable) -> None:
    stock_reduce, stock_gather = launcher.all_reduce, launcher._all_gather

    def reduce(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        def launch(chunk: tf.Tensor) -> tf.Tensor:
            return stock_reduce(chunk, *args, **kwargs)

        return all_reduce(launch, tf.convert_to_tensor(tensor))

    def gather(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        def launch(chunk: tf.Tensor) -> tf.Tensor:
            return stock_gather(chunk, *args, **kwargs)

        return all_gather(launch, tf.convert_to_tensor(tensor), launcher._group_size)

    launcher.all_reduce, launcher._all_gather = reduce, gather


def kinds_of_collectives(collective_ops: Any) -> set[tuple]:
    """Return kind, dtype and shape of all collectives so far, one for each key."""
    return set().union(*(x._tf_dgc_kinds for x in launchers(collective_ops)))


def collective_key(kind: str, tensor: tf.Tensor) -> tf.Tensor:
    """Return the key of a collective, scalar int32: a hash of kind, dtype and shape."""
    # If two shapes of a model collide, with a probability of 10^-9, TensorFlow rejects
    # the second.
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


# Above the keys that TensorFlow itself uses to create variables, and below 2**31.
_FIRST_KEY = 1_000_000_000
_NUM_KEYS = 1_000_000_007  # a prime
_FACTORS = np.array([pow(1_000_003, i, _NUM_KEYS) for i in range(1, 17)], np.int64)


# Groups of replicas

Members = tuple[int, ...]


class GroupLauncher:
    """Launches the collectives of one replica in one group."""

    # TensorFlow numbers groups in each process (`CollectiveKeys`), so that different
    # groups would get the same key; here a group's key is derived from its members. The
    # collectives of all groups of a replica run in one order (`_ordering_token`): two
    # at once with the same key would get each other's values. `lane` is 0 for the steps
    # themselves.

    def __init__(self, launcher: Any, members: Members, rank: int, lane: int = 0):
        self._launcher = launcher
        self._members = members
        self._rank = rank
        self._lane = lane
        self.counters = Counters()
        self.kinds: set[tuple] = set()

    @property
    def on_gpu(self) -> bool:
        """Whether the replica is on a GPU."""
        return "GPU" in self._launcher._device

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Launch one `CollectiveReduceV2` that sums."""
        return self._launch("sum", tensor, collective_ops.all_reduce_v2)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Launch one `CollectiveGatherV2`, which concatenates along the first axis."""
        return self._move("gather", tensor, collective_ops.all_gather_v2)

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Launch one `CollectiveAllToAllV2` of a row for each member."""
        return self._move("spread", tensor, collective_ops.all_to_all_v2)

    def broadcast(self, tensor: tf.Tensor, source: int) -> tf.Tensor:
        """Launch one `CollectiveBcastSendV2` or `CollectiveBcastRecvV2`."""
        # The source is part of the key: TensorFlow keeps the first source of a key.

        def launch(values: tf.Tensor, *keys: Any, **options: Any) -> tf.Tensor:
            del options["ordering_token"]  # not supported by this collective
            with tf.control_dependencies([values, *self._pass_token()]):
                if self._members[self._rank] == source:
                    result = collective_ops.broadcast_send_v2(values, *keys, **options)
                else:
                    result = collective_ops.broadcast_recv_v2(
                        tf.shape(values), values.dtype, *keys, **options
                    )
            with tf.control_dependencies([result]):
                token = self._pass_token()
            with tf.control_dependencies(token):
                return tf.ensure_shape(result, values.shape)

        return self._move(f"broadcast of {source}", tensor, launch)

    def _pass_token(self) -> list[tf.Operation]:
        """Return an operation between all collectives so far and the next ones."""
        done = self._launcher._ordering_token.assign_add(0.0, read_value=False)
        return [] if done is None else [done]

    def _move(self, kind: str, tensor: tf.Tensor, launch: Callable) -> tf.Tensor:
        """Launch a collective that moves values and does not add them."""
        # TensorFlow has none of these for bfloat16, whose bits are sent as float16.
        if tensor.dtype != tf.bfloat16:
            return self._launch(kind, tensor, launch)
        moved = self._launch(kind, tf.bitcast(tensor, tf.float16), launch)
        return tf.bitcast(moved, tf.bfloat16)

    def _launch(self, kind: str, tensor: tf.Tensor, launch: Callable) -> tf.Tensor:
        label = f"{kind} {self._members}"
        self.kinds.add((label, tensor.dtype.name, str(tensor.shape)))
        stock = self._launcher
        key = collective_key(label, tensor)
        record_collective(f"{kind} of replicas {self._members}", tensor, key)
        with tf.device(stock._device):
            result = launch(
                tensor,
                len(self._members),
                group_key(self._members, self._lane),
                self.counters.start(tensor, key),
                communication_hint=stock._options.implementation.value,
                timeout=stock._options.timeout_seconds or 0,
                ordering_token=stock._get_ordering_token(),
            )
            return self.counters.finish(result, key)


def group_key(members: Sequence[int], lane: int = 0) -> int:
    """Return the key of a group in a lane, equal on all of its members."""
    name = f"group {tuple(members)}" + (f" of lane {lane}" if lane else "")
    return _FIRST_GROUP_KEY + zlib.crc32(name.encode()) % _NUM_GROUP_KEYS


def in_lane(collective_ops: Any, lane: int) -> Any:
    """Return another `CollectiveAllReduce` of these replicas, for a background lane."""
    # It has its own group key and ordering tokens, so that its collectives do not wait
    # for others. Lanes have numbers from 1, equal on all workers.
    keys = cross_device_utils.CollectiveKeys(group_key_start=group_key((), lane))
    stock = collective_ops
    return CollectiveAllReduce(
        stock._devices,
        stock._group_size,
        stock._options,
        keys,
        stock._canonicalize_devices,
    )


# Above the keys that TensorFlow counts.
_FIRST_GROUP_KEY = 1_000_000
_NUM_GROUP_KEYS = 2_000_000_000


# Strategies


def get_cross_device_ops(strategy: tf.distribute.Strategy) -> Any:
    """Return the strategy's reduction (`StrategyExtended._cross_device_ops`)."""
    return strategy.extended._cross_device_ops


def set_cross_device_ops(strategy: tf.distribute.Strategy, ops: Any) -> None:
    """Replace the reduction of this strategy instance."""
    strategy.extended._cross_device_ops = ops


def is_default(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether it is None, or TensorFlow's default strategy."""
    return strategy is None or isinstance(
        strategy,
        distribute_lib._DefaultDistributionStrategy
        | distribute_lib._DefaultDistributionStrategyV1,
    )


def collective_ops_of(strategy: tf.distribute.Strategy) -> Any | None:
    """Return the strategy's `CollectiveAllReduce`, or None if it has none."""
    for ops in (
        get_cross_device_ops(strategy),
        getattr(strategy.extended, "_collective_ops", None),
    ):
        if isinstance(ops, CollectiveAllReduce):
            return ops
    return None


def wrap_variable_creation(
    strategy: tf.distribute.Strategy, wrap: Callable[[Callable], Callable]
) -> None:
    """Wrap how this strategy instance creates variables (`_create_variable`)."""
    extended = strategy.extended
    extended._create_variable = wrap(extended._create_variable)


def check_updates(
    strategy: tf.distribute.Strategy, reject: Callable[[tf.Variable], None]
) -> None:
    """Call `reject`, which raises, if an optimizer updates another scope's variable."""
    stock = strategy.extended.update

    def update(var: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(var, tf.Variable) and not isinstance(
            var, values.DistributedVariable
        ):
            reject(var)
        return stock(var, *args, **kwargs)

    strategy.extended.update = update


def allow_conditions(strategy: tf.distribute.Strategy) -> None:
    """Allow Keras's stock optimizers to reduce and update within conditions."""
    # For gradient accumulation and `ema_overwrite_frequency` Keras builds a condition
    # in each replica. Within it TensorFlow raises in `merge_call`, because replicas
    # cannot meet there; without `_use_merge_call` each replica launches its own
    # collectives and updates its own copies.
    extended = strategy.extended
    stock_merges, stock_ops = extended._use_merge_call, extended._get_cross_device_ops
    stock_reduce = extended._replica_ctx_all_reduce

    def use_merge_call() -> bool:
        return stock_merges() and not _is_in_condition()

    def get_cross_device_ops(value: Any) -> Any:
        return collective_ops_of(strategy) if _is_in_condition() else stock_ops(value)

    def all_reduce(reduce_op: Any, value: Any, options: Any = None) -> Any:
        is_single = strategy.num_replicas_in_sync == 1 and _is_in_condition()
        return value if is_single else stock_reduce(reduce_op, value, options)

    extended._replica_ctx_all_reduce = all_reduce
    extended._use_merge_call = use_merge_call
    extended._get_cross_device_ops = get_cross_device_ops


def _is_in_condition() -> bool:
    thread, graph = threading.current_thread(), tf.compat.v1.get_default_graph()
    if not isinstance(thread, mirrored_run._MirroredReplicaThread) or thread.in_eager:
        return False
    inner = graph
    while inner is not thread.graph:
        if not isinstance(inner, control_flow_v2_func_graphs.CondBranchFuncGraph):
            return False
        inner = inner.outer_graph
    return graph is not thread.graph


def per_replica(values: Sequence[Any]) -> Any:
    """Wrap one value per local replica (`distribute_utils.regroup`)."""
    return distribute_utils.regroup(tuple(values))


# Creation of variables


class WorkerGroup:
    """Eager collectives of one CPU of every worker, one after the other."""

    def __init__(self, strategy: tf.distribute.MultiWorkerMirroredStrategy):
        extended = strategy.extended
        self._device = device_util.get_host_for_device(extended.worker_devices[0])
        self._group = extended._collective_keys.get_group_key([self._device])
        self.size: int = extended._num_workers
        self.is_first: bool = extended._is_chief

    def all_gather(self, words: tf.Tensor) -> tf.Tensor:
        """Return the words of all workers, `[size, w]` of int32 `[w]`."""
        with tf.device(self._device):
            key = collective_key("creation", words)
            rows = collective_ops.all_gather_v2(words, self.size, self._group, key)
            return tf.reshape(rows, [self.size, -1])

    def broadcast(self, words: tf.Tensor) -> tf.Tensor:
        """Return the first worker's words; all must have the same shape."""
        with tf.device(self._device):
            key = collective_key("broadcast", words)
            if not self.is_first:
                return collective_ops.broadcast_recv_v2(
                    words.shape, words.dtype, self.size, self._group, key
                )
            return collective_ops.broadcast_send_v2(words, self.size, self._group, key)


def replace_initial_values(
    strategy: tf.distribute.MultiWorkerMirroredStrategy,
    synchronize: Callable[[tf.Tensor, str], tf.Tensor],
    stock_broadcast: Callable[[Callable[[], tf.Tensor]], tf.Tensor],
) -> None:
    """Replace the broadcast of the first worker's initial values by a function."""
    # It is in `CollectiveAllReduceExtended._get_variable_creator_initial_value`, and
    # stays (`stock_broadcast`) if a graph creates the variable or it does not contain
    # numbers.
    stock = strategy.extended._get_variable_creator_initial_value

    def creator(replica_id: int, device: Any, primary_var: Any, **kwargs: Any) -> Any:
        stock_value = stock(replica_id, device, primary_var, **kwargs)
        if replica_id > 0:  # copies the first replica's value
            return stock_value

        def initial_value() -> tf.Tensor:
            if not tf.executing_eagerly():
                return stock_broadcast(stock_value)
            with tf.device(device):
                value = _value(kwargs["initial_value"], kwargs.get("dtype"))
            kind = value.dtype
            numeric = kind.is_floating or kind.is_integer or kind.is_complex
            if not numeric and not kind.is_bool:
                return stock_broadcast(stock_value)
            return synchronize(value, kwargs.get("name") or "without a name")

        return initial_value

    strategy.extended._get_variable_creator_initial_value = creator


def _value(initial: Any, dtype: Any) -> tf.Tensor:
    """Return an initial value, which may be a function or come from a checkpoint."""
    if callable(initial):
        initial = initial()
    if isinstance(initial, base.CheckpointInitialValue):
        initial = initial.wrapped_value
    return tf.convert_to_tensor(initial, dtype)
