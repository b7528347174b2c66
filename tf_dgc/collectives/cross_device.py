"""Cross-device operations that extend a strategy's own by compressed exchanges."""

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc._internals.tf_collectives import GroupLauncher
from tf_dgc.arguments import show
from tf_dgc.collectives.algorithm import (
    CollectiveAlgorithm,
    MergeSteps,
    Rank,
    run_together,
)
from tf_dgc.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    BufferLayout,
    DenseOrSparse,
    DenseOrSparseReply,
    Primitive,
    Reply,
    Request,
    SendRecv,
    group_members,
)
from tf_dgc.collectives.sparse_merge import FlatIndexSpace
from tf_dgc.conditions import BoolOrTensor, smart_cond
from tf_dgc.multiworker import chunks
from tf_dgc.multiworker.positions import Group

Outcome = TypeVar("Outcome")
Tensors: TypeAlias = tuple[tf.Tensor, ...]

Bounds: TypeAlias = tuple[int | None, int | None]
"""Upper bounds of the bytes of a vector and of words; None without a bound."""

SUPPORTED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


class RoutedAlgorithm(NamedTuple):
    """A collective algorithm and the ranks of the local replicas in it."""

    algorithm: CollectiveAlgorithm
    ranks: Sequence[Rank]


class GroupRequest:
    """A replica's request within a group.

    Not a tuple: a strategy would take it apart.

    Raises:
        ValueError: for an invalid group or partner; see `requests.group_members`.
    """

    def __init__(self, request: Request, worker: int, num_workers: int):
        self.request = request
        self.worker = worker
        self.members = group_members(request, worker, num_workers)


class CompressedCrossDeviceOps(tf.distribute.CrossDeviceOps):
    """A `tf.distribute.CrossDeviceOps` that also exchanges compressed payloads.

    `communicate` runs a whole step in one collective; `answer` runs a request within a
    group. Everything else (metrics, `strategy.reduce`, `strategy.gather`) is delegated
    to the strategy's original operations.

    Args:
        base: the strategy's own `tf.distribute.CrossDeviceOps`.
        collective_ops: TensorFlow's `CollectiveAllReduce` for the same replicas,
            whose group and instance keys are used.
        lane: number of the lane, which separates the keys of concurrent collectives; 0
            for the lane of the steps.
    """

    def __init__(
        self, base: tf.distribute.CrossDeviceOps, collective_ops: Any, lane: int = 0
    ):
        super().__init__()
        self.base = base
        self.collective_ops = collective_ops
        self._launchers = tf_collectives.launchers(collective_ops)
        self._counters = tf_collectives.reuse_collective_keys(collective_ops)
        tf_collectives.wrap_launches(
            collective_ops, chunks.chunked_all_reduce, chunks.chunked_all_gather
        )
        self._groups = ProcessGroups(collective_ops, lane)

    def communicate(
        self,
        dense: BoolOrTensor,
        vector: Any,
        words: Any,
        bounds: Bounds = (None, None),
        algorithm: RoutedAlgorithm | None = None,
    ) -> tuple[Any, Any]:
        """Sum a dense vector or gather sparse buffers.

        Takes one collective, or one per chunk of a large tensor, or the rounds of an
        algorithm. Call it in cross-replica context.

        Args:
            dense: whether to sum, the same on all replicas: a bool, or a (per-replica)
                scalar bool tensor.
            vector: values to sum, per replica, float `[n]`; used if `dense`.
            words: words to gather, per replica, int32 `[w]`, w the same on all
                replicas; used unless `dense`.
            bounds: upper bounds of the bytes of `vector` and `words`, for shapes that
                are known only at run time. Such a tensor is sent in one piece if it
                has no bound.
            algorithm: algorithm to use; None for TensorFlow's own collectives.

        Returns:
            The sum of the vectors, `[n]`, and the gathered buffers, int32
            `[num_replicas * w]`, per replica; one of them is empty.
        """
        local = tf.distribute.get_strategy().experimental_local_results
        if not isinstance(dense, bool):
            dense = local(dense)[0]
        vectors, buffers = local(vector), local(words)

        def summed() -> tuple[Tensors, Tensors]:
            if algorithm is None:
                total = self._sum_with_tensorflow(vectors, bounds[0])
            else:
                total = self._sum_with_algorithm(vectors, algorithm)
            return total, _empty(buffers)

        def gathered() -> tuple[Tensors, Tensors]:
            if algorithm is None:
                rows = self._gather_with_tensorflow(buffers, bounds[1])
            else:
                rows = self._gather_with_algorithm(buffers, algorithm)
            return _empty(vectors), rows

        total, rows = smart_cond(dense, summed, gathered)
        return tf_collectives.per_replica(total), tf_collectives.per_replica(rows)

    def merge(
        self,
        dense: BoolOrTensor,
        vector: Any,
        words: Any,
        layout: BufferLayout,
        algorithm: RoutedAlgorithm,
    ) -> tuple[Any, ...]:
        """Sum a dense vector or merge the entries of sparse buffers.

        Args:
            dense: whether to sum, as in `communicate`.
            vector: values to sum, as in `communicate`.
            words: sparse buffer, int32 `[w]`, per replica.
            layout: layout of the buffers.
            algorithm: algorithm that merges.

        Returns:
            Per replica: the sum and the merged buffer `[w]`, one of them empty, and a
            mask of the replica's entries that were delivered. If the algorithm
            `keeps_sums`, also the positions and values of the replica's `Remainder`.
        """
        local = tf.distribute.get_strategy().experimental_local_results
        dense = dense if isinstance(dense, bool) else local(dense)[0]
        vectors, buffers = local(vector), local(words)
        keeps_sums = algorithm.algorithm.keeps_sums

        def start(words: tf.Tensor, rank: Rank) -> MergeSteps:
            return algorithm.algorithm.merge(words, layout, rank)

        def merged() -> tuple[Tensors, ...]:
            steps = list(map(start, buffers, algorithm.ranks))
            results = self.run_steps(steps, algorithm.ranks)
            words, delivered, remainders = zip(*results, strict=True)
            dropped = zip(*remainders, strict=True) if keeps_sums else ()
            return _empty(vectors), words, delivered, *dropped

        def summed() -> tuple[Tensors, ...]:
            dtypes = [tf.int32, tf.bool]
            if keeps_sums:
                dtypes += [tf.int32, FlatIndexSpace(layout).dtype]
            total = self._sum_with_algorithm(vectors, algorithm)
            return total, *(_empty(buffers, dtype) for dtype in dtypes)

        return tuple(map(tf_collectives.per_replica, smart_cond(dense, summed, merged)))

    def answer(self, requests: Any) -> Any:
        """Run requests within groups; call it in cross-replica context.

        Args:
            requests: a `GroupRequest` per replica.

        Returns:
            The replies, per replica.
        """
        local = tf.distribute.get_strategy().experimental_local_results(requests)

        def answer(_: Any, replica: int) -> Reply:
            return self._groups.answer(replica, local[replica])

        return tf_collectives.per_replica(self._launch(answer, range(len(local))))

    def run_steps(
        self,
        steps: Sequence[Generator[Any, Any, Outcome]],
        ranks: Sequence[Rank],
    ) -> list[Outcome]:
        """Run the generators of all local replicas; return their results."""
        return run_together(steps, lambda requests: self.answer_round(requests, ranks))

    def answer_round(
        self, requests: Sequence[Sequence[Primitive]], ranks: Sequence[Rank]
    ) -> list[list[Reply]]:
        """Return the replies to one round of requests of each local replica."""

        def answer(_: Any, replica: int) -> list[Reply]:
            worker, num_workers = ranks[replica]
            return [
                self._groups.answer(replica, GroupRequest(request, worker, num_workers))
                for request in requests[replica]
            ]

        return list(self._launch(answer, range(len(ranks))))

    def count(self) -> dict[Group, list[int]]:
        """Return the numbers of started and finished collectives, by worker group."""
        return {None: self._counters.read(), **self._groups.count()}

    def pending_keys(self) -> dict[Group, int]:
        """Return the key of the unfinished collective, or 0, by worker group."""
        return {None: self._counters.pending_key(), **self._groups.pending_keys()}

    @property
    def num_keys(self) -> int:
        """Number of collective keys in use; it does not grow with the steps."""
        kinds = tf_collectives.kinds_of_collectives(self.collective_ops)
        return len(kinds) + self._groups.num_keys

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

    def _sum_with_tensorflow(self, vectors: Any, max_bytes: int | None) -> Tensors:
        def all_reduce(launcher: Any, vector: tf.Tensor) -> tf.Tensor:
            launch = functools.partial(tf_collectives.launch_all_reduce, launcher)
            if max_bytes is None or vector.shape.is_fully_defined():
                return launch(vector)
            return chunks.chunked_all_reduce_of_unknown_length(
                launch, vector, max_bytes
            )

        return self._launch(all_reduce, vectors)

    def _gather_with_tensorflow(self, buffers: Any, max_bytes: int | None) -> Tensors:
        def all_gather(launcher: Any, words: tf.Tensor) -> tf.Tensor:
            if words.shape == [0]:
                return words  # nothing to send
            launch = functools.partial(tf_collectives.launch_all_gather, launcher)
            if max_bytes is None or words.shape.is_fully_defined():
                return launch(words)
            num_replicas = tf_collectives.group_size(launcher)
            return chunks.chunked_all_gather_of_unknown_length(
                launch, words, num_replicas, max_bytes
            )

        return self._launch(all_gather, buffers)

    def _sum_with_algorithm(self, vectors: Any, algorithm: RoutedAlgorithm) -> Tensors:
        steps = list(map(algorithm.algorithm.sum, vectors, algorithm.ranks))
        return tuple(self.run_steps(steps, algorithm.ranks))

    def _gather_with_algorithm(
        self, buffers: Any, algorithm: RoutedAlgorithm
    ) -> Tensors:
        steps = list(map(algorithm.algorithm.gather, buffers, algorithm.ranks))
        return tuple(self.run_steps(steps, algorithm.ranks))

    def _launch(
        self, launch: Callable[[Any, Any], Any], values: Any
    ) -> tuple[Any, ...]:
        with tf_collectives.launch_lock(self.collective_ops):
            if not tf.executing_eagerly() or len(self._launchers) == 1:
                return tuple(map(launch, self._launchers, values))
            # Eager collectives of several replicas must start concurrently: the first
            # would wait for the others forever.
            with ThreadPoolExecutor(len(self._launchers)) as threads:
                return tuple(threads.map(launch, self._launchers, values))


_DELEGATED = frozenset(
    name
    for name in vars(tf.distribute.CrossDeviceOps)
    if name.startswith("_") and not name.startswith("__")
) - {"_canonicalize_devices"}


def cross_device_ops(strategy: tf.distribute.Strategy) -> CompressedCrossDeviceOps:
    """Return the strategy's `CompressedCrossDeviceOps`; the first call installs it."""
    if not isinstance(strategy, SUPPORTED):
        raise ValueError(
            "tf_dgc trains under no strategy, `tf.distribute.MirroredStrategy` or "
            "`tf.distribute.MultiWorkerMirroredStrategy`. "
            f"Received: strategy={show(strategy)}"
        )
    current = tf_collectives.get_cross_device_ops(strategy)
    if isinstance(current, CompressedCrossDeviceOps):
        return current
    collective_ops = tf_collectives.collective_ops_of(strategy)
    if collective_ops is None:
        raise ValueError(
            "TensorFlow has no collectives between devices of different kinds. Use "
            "devices of one kind. "
            f"Received: devices={strategy.extended.worker_devices}"
        )
    hook = CompressedCrossDeviceOps(current, collective_ops)
    tf_collectives.set_cross_device_ops(strategy, hook)
    return hook


class ProcessGroups:
    """Runs requests of the local replicas within groups of workers."""

    def __init__(self, collective_ops: Any, lane: int = 0):
        self._lane = lane
        self._stock_launchers = tf_collectives.launchers(collective_ops)
        self._launchers: dict[tuple[int, tuple[int, ...]], GroupLauncher] = {}

    def answer(self, replica: int, group_request: GroupRequest) -> Reply:
        """Return the reply to a request of the local replica with this index."""
        request, members = group_request.request, group_request.members
        if len(members) == 1:
            return reply_of_single_worker(request)
        # TensorFlow's gather of an empty tensor crashes.
        if not isinstance(request, DenseOrSparse) and 0 in request[0].shape:
            return _empty_reply(request, len(members))
        launcher = self._launcher(replica, group_request)
        if isinstance(request, DenseOrSparse):
            return _launch_dense_or_sparse(launcher, request, len(members))
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


def reply_of_single_worker(request: Request) -> Reply:
    """Return the reply in a group of one worker."""
    if isinstance(request, DenseOrSparse):
        return DenseOrSparseReply(request.vector, request.words[tf.newaxis])
    value = request[0]
    return value[tf.newaxis] if isinstance(request, AllGather) else tf.identity(value)


def _empty_reply(request: Primitive, num_members: int) -> tf.Tensor:
    value: Any = request[0]
    if isinstance(request, AllGather):
        return tf.zeros([num_members, *value.shape], value.dtype)
    return tf.identity(value)


def _launch_dense_or_sparse(
    launcher: GroupLauncher, request: DenseOrSparse, num_members: int
) -> DenseOrSparseReply:
    def summed() -> tuple[tf.Tensor, tf.Tensor]:
        no_rows = tf.zeros([num_members, 0], tf.int32)
        return _all_reduce(launcher, request.vector), no_rows

    def gathered() -> tuple[tf.Tensor, tf.Tensor]:
        return request.vector[:0], _all_gather(launcher, request.words, num_members)

    total, buffers = smart_cond(request.dense, summed, gathered)
    return DenseOrSparseReply(total, buffers)


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


def _empty(values: Any, dtype: tf.DType | None = None) -> Tensors:
    return tuple(tf.zeros([0], dtype or v.dtype) for v in values)
