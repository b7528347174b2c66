"""Cross-device operations that chunk and count the collectives of a strategy."""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc._internals.tf_collectives import Counters, GroupLauncher
from tf_dgc.arguments import show
from tf_dgc.multiworker import chunks
from tf_dgc.multiworker.positions import Group
from tf_dgc.multiworker.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Primitive,
    SendRecv,
    group_members,
)

Tensors: TypeAlias = tuple[tf.Tensor, ...]
"""A tensor of each local replica."""

SUPPORTED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


class GroupRequest:
    """A replica's request within a group.

    Not a tuple: a strategy would take it apart.

    Raises:
        ValueError: for an invalid group or partner; see `requests.group_members`.
    """

    def __init__(self, request: Primitive, worker: int, num_workers: int):
        self.request = request
        self.worker = worker
        self.members = group_members(request, worker, num_workers)


class WorkerCrossDeviceOps(tf.distribute.CrossDeviceOps):
    """A strategy's own operations, whose collectives are chunked and counted.

    Also answers requests of groups of replicas. Reductions and gathers of TensorFlow
    (metrics, `strategy.reduce`, `strategy.gather`) are delegated to the strategy's own
    operations. Create it with `create_hook`.

    Args:
        base: the strategy's own `tf.distribute.CrossDeviceOps`.
        collective_ops: TensorFlow's `CollectiveAllReduce` for the same replicas.
        counters: counters of the collectives of all replicas.
        groups: collectives of groups of replicas.
    """

    def __init__(
        self,
        base: tf.distribute.CrossDeviceOps,
        collective_ops: Any,
        counters: Counters,
        groups: "ProcessGroups",
    ):
        super().__init__()
        self.base = base
        self.collective_ops = collective_ops
        self.counters = counters
        self.groups = groups
        self._launchers = tf_collectives.launchers(collective_ops)

    def all_reduce(
        self, vectors: Sequence[tf.Tensor], max_bytes: int | None = None
    ) -> Tensors:
        """Return the sum over all replicas, for each local replica.

        Args:
            vectors: values of the local replicas, float `[n]`, n the same on all.
            max_bytes: upper bound of the bytes of a vector whose shape is known only
                at run time; without one it is sent in one piece.
        """

        def reduce(launcher: Any, vector: tf.Tensor) -> tf.Tensor:
            launch = functools.partial(tf_collectives.launch_all_reduce, launcher)
            if max_bytes is None or vector.shape.is_fully_defined():
                return launch(vector)
            return chunks.chunked_all_reduce_of_unknown_length(
                launch, vector, max_bytes
            )

        return self.launch(reduce, vectors)

    def all_gather(
        self, buffers: Sequence[tf.Tensor], max_bytes: int | None = None
    ) -> Tensors:
        """Return the words of all replicas, int32 `[N * w]`, for each local replica.

        Args:
            buffers: words of the local replicas, int32 `[w]`, w the same on all.
            max_bytes: upper bound of the bytes of a buffer, as in `all_reduce`.
        """

        def gather(launcher: Any, words: tf.Tensor) -> tf.Tensor:
            if words.shape == [0]:
                return words  # nothing to send
            launch = functools.partial(tf_collectives.launch_all_gather, launcher)
            if max_bytes is None or words.shape.is_fully_defined():
                return launch(words)
            num_replicas = tf_collectives.group_size(launcher)
            return chunks.chunked_all_gather_of_unknown_length(
                launch, words, num_replicas, max_bytes
            )

        return self.launch(gather, buffers)

    def answer(self, requests: Any) -> Any:
        """Run requests within groups; call it in cross-replica context.

        Args:
            requests: a `GroupRequest` per replica.

        Returns:
            The replies, per replica.
        """
        local = tf.distribute.get_strategy().experimental_local_results(requests)

        def answer(_: Any, replica: int) -> tf.Tensor:
            return self.groups.answer(replica, local[replica])

        return tf_collectives.per_replica(self.launch(answer, range(len(local))))

    def answer_round(
        self, requests: Sequence[Sequence[Primitive]], ranks: Sequence[tuple[int, int]]
    ) -> list[list[tf.Tensor]]:
        """Return the replies to one round of requests of each local replica.

        `ranks` are the local replicas' indices and the number of replicas.
        """

        def answer(_: Any, replica: int) -> list[tf.Tensor]:
            worker, num_workers = ranks[replica]
            return [
                self.groups.answer(replica, GroupRequest(request, worker, num_workers))
                for request in requests[replica]
            ]

        return list(self.launch(answer, range(len(ranks))))

    def launch(self, launch: Callable[[Any, Any], Any], values: Any) -> tuple[Any, ...]:
        """Call `launch` with the launcher and the value of each local replica."""
        with tf_collectives.launch_lock(self.collective_ops):
            if not tf.executing_eagerly() or len(self._launchers) == 1:
                return tuple(map(launch, self._launchers, values))
            # Eager collectives of several replicas must start concurrently: the first
            # would wait for the others forever.
            with ThreadPoolExecutor(len(self._launchers)) as threads:
                return tuple(threads.map(launch, self._launchers, values))

    def count(self) -> dict[Group, list[int]]:
        """Return the numbers of started and finished collectives, by worker group."""
        return {None: self.counters.read(), **self.groups.count()}

    def pending_keys(self) -> dict[Group, int]:
        """Return the key of the unfinished collective, or 0, by worker group."""
        return {None: self.counters.pending_key(), **self.groups.pending_keys()}

    @property
    def num_keys(self) -> int:
        """Number of collective keys in use; it does not grow with the steps."""
        kinds = tf_collectives.kinds_of_collectives(self.collective_ops)
        return len(kinds) + self.groups.num_keys

    def abort_message(self, seconds: float) -> str:
        """Return why all collectives of this worker fail, or "".

        May abort them: call it only when training cannot continue anyway. See
        `tf_collectives.abort_message`.
        """
        return tf_collectives.abort_message(self.collective_ops, seconds)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate to the strategy's own reduction."""
        return self.base.reduce(*args, **kwargs)

    def batch_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate to the strategy's own reduction."""
        return self.base.batch_reduce(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate to the strategy's own broadcast."""
        return self.base.broadcast(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        # TensorFlow calls private methods (`_all_reduce`, `_gather`,
        # `_num_between_graph_workers`, ...) that the base class defines, so
        # `__getattr__` alone would never see them.
        if name in _DELEGATED:
            return getattr(self.base, name)
        return super().__getattribute__(name)


_DELEGATED = frozenset(
    name
    for name in vars(tf.distribute.CrossDeviceOps)
    if name.startswith("_") and not name.startswith("__")
) - {"_canonicalize_devices"}


def cross_device_ops(strategy: tf.distribute.Strategy) -> WorkerCrossDeviceOps:
    """Return the strategy's `WorkerCrossDeviceOps`; the first call installs it."""
    if not isinstance(strategy, SUPPORTED):
        raise ValueError(
            "tf_dgc supports `tf.distribute.MirroredStrategy`, "
            "`tf.distribute.MultiWorkerMirroredStrategy`, and training without a "
            "strategy. For several machines use `tf_dgc.multi_worker_strategy()`. "
            f"Received: strategy={show(strategy)}"
        )
    current = tf_collectives.get_cross_device_ops(strategy)
    if isinstance(current, WorkerCrossDeviceOps):
        return current
    collective_ops = tf_collectives.collective_ops_of(strategy)
    if collective_ops is None:
        raise ValueError(
            "TensorFlow has no collectives between devices of different kinds. Use "
            "devices of one kind. "
            f"Received: devices={strategy.extended.worker_devices}"
        )
    hook = create_hook(current, collective_ops)
    tf_collectives.set_cross_device_ops(strategy, hook)
    return hook


def create_hook(
    base: tf.distribute.CrossDeviceOps, collective_ops: Any, lane: int = 0
) -> WorkerCrossDeviceOps:
    """Return cross-device operations that launch their collectives in a lane.

    Changes the launchers of `collective_ops`: call it once for each.

    Args:
        base: the strategy's own `tf.distribute.CrossDeviceOps`.
        collective_ops: TensorFlow's `CollectiveAllReduce` for the same replicas,
            whose group and instance keys are used.
        lane: number of the lane, which separates the keys of concurrent collectives; 0
            for the lane of the steps.
    """
    counters = tf_collectives.reuse_collective_keys(collective_ops)
    tf_collectives.wrap_launches(
        collective_ops, chunks.chunked_all_reduce, chunks.chunked_all_gather
    )
    groups = ProcessGroups(collective_ops, lane)
    return WorkerCrossDeviceOps(base, collective_ops, counters, groups)


class ProcessGroups:
    """Runs requests of the local replicas within groups of workers."""

    def __init__(self, collective_ops: Any, lane: int = 0):
        self._lane = lane
        self._stock_launchers = tf_collectives.launchers(collective_ops)
        self._launchers: dict[tuple[int, tuple[int, ...]], GroupLauncher] = {}

    def answer(self, replica: int, group_request: GroupRequest) -> tf.Tensor:
        """Return the reply to a request of the local replica with this index."""
        request, members = group_request.request, group_request.members
        if len(members) == 1:
            return reply_in_group_of_one(request)
        # TensorFlow's gather of an empty tensor crashes.
        if 0 in request[0].shape:
            return _empty_reply(request, len(members))
        launcher = self._launcher(replica, group_request)
        return _launch_primitive(launcher, request, members)

    def count(self) -> dict[Group, list[int]]:
        """Return the numbers of started and finished collectives, by worker group.

        Leaves out groups within one worker: they wait for no other worker.
        """
        counts: dict[Group, list[int]] = {}
        for group, launcher in self._launchers_by_worker_group():
            started, finished = launcher.counters.read()
            total = counts.setdefault(group, [0, 0])
            total[0] += started
            total[1] += finished
        return counts

    def pending_keys(self) -> dict[Group, int]:
        """Return the key of the unfinished collective, or 0, by worker group.

        0 also if several local replicas are in collectives of the same workers.
        """
        keys: dict[Group, int] = {}
        for group, launcher in self._launchers_by_worker_group():
            keys[group] = 0 if group in keys else launcher.counters.pending_key()
        return keys

    @property
    def num_keys(self) -> int:
        """Number of collective keys in use."""
        return len(set().union(*(x.kinds for x in self._launchers.values())))

    def _launchers_by_worker_group(self) -> Iterator[tuple[Group, GroupLauncher]]:
        num_local = len(self._stock_launchers)
        for (_, members), launcher in list(self._launchers.items()):
            group = tuple(sorted({member // num_local for member in members}))
            if len(group) > 1:
                yield group, launcher

    def _launcher(self, replica: int, group_request: GroupRequest) -> GroupLauncher:
        members = group_request.members
        key = replica, members
        if key not in self._launchers:
            self._launchers[key] = tf_collectives.GroupLauncher(
                self._stock_launchers[replica],
                members,
                members.index(group_request.worker),
                self._lane,
            )
        return self._launchers[key]


def reply_in_group_of_one(request: Primitive) -> tf.Tensor:
    """Return the reply to the only worker of a group."""
    value = request[0]
    return value[tf.newaxis] if isinstance(request, AllGather) else tf.identity(value)


def _empty_reply(request: Primitive, num_members: int) -> tf.Tensor:
    value: Any = request[0]
    if isinstance(request, AllGather):
        return tf.zeros([num_members, *value.shape], value.dtype)
    return tf.identity(value)


def _launch_primitive(
    launcher: GroupLauncher, request: Primitive, members: Sequence[int]
) -> tf.Tensor:
    if isinstance(request, AllReduce):
        return _all_reduce(launcher, request.values)
    if isinstance(request, AllGather):
        return _all_gather(launcher, request.words, len(members))
    if isinstance(request, SendRecv):
        values = request.values
        rows = _all_gather(launcher, tf.reshape(values, [-1]), len(members))
        shape = tf.shape(values) if None in values.shape else values.shape
        return tf.reshape(rows[members.index(request.partner)], shape)
    if isinstance(request, AllToAll):
        if launcher.on_gpu:
            return launcher.all_to_all(request.rows)
        return chunks.chunked_all_to_all(launcher.all_to_all, request.rows)
    launch = functools.partial(launcher.broadcast, source=request.source)
    chunked = functools.partial(chunks.chunked_all_reduce, launch)
    return (launch if launcher.on_gpu else chunked)(request.values)


def _all_reduce(launcher: GroupLauncher, values: tf.Tensor) -> tf.Tensor:
    if launcher.on_gpu:
        return launcher.all_reduce(values)
    return chunks.chunked_all_reduce(launcher.all_reduce, values)


def _all_gather(
    launcher: GroupLauncher, vector: tf.Tensor, num_members: int
) -> tf.Tensor:
    """Return the vectors of all members, `[num_members, n]`."""
    if launcher.on_gpu:
        gathered = launcher.all_gather(vector)
    else:
        gathered = chunks.chunked_all_gather(launcher.all_gather, vector, num_members)
    length = -1 if None in vector.shape else vector.shape[0]
    return tf.reshape(gathered, [num_members, length])
