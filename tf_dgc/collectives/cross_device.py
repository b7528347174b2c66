"""The cross-device hook: a strategy's reduction that also exchanges payloads."""

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

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
    Broadcast,
    BufferLayout,
    DenseOrSparse,
    DenseOrSparseReply,
    Message,
    Primitive,
    Reply,
    SendRecv,
    group_members,
)
from tf_dgc.collectives.sparse_merge import FlatIndexSpace
from tf_dgc.multiworker import chunks
from tf_dgc.multiworker.positions import Group
from tf_dgc.smart_cond import BoolOrTensor, smart_cond

# --- Collectives of groups of workers, of pairs too, beside those of all.


class GroupRequest:
    """What one replica asks for; no tuple, which a strategy would take apart.

    Args:
        message: its request.
        worker: its index among all.
        num_workers: number of replicas in sync, N.

    Raises:
        ValueError: as `members_of`.
    """

    def __init__(self, message: Message, worker: int, num_workers: int):
        self.message = message
        self.worker = worker
        self.members = group_members(message, worker, num_workers)


class ProcessGroups:
    """Launches what the local replicas ask for within groups.

    Args:
        collective_ops: TensorFlow's `CollectiveAllReduce` for all replicas.
        lane: number of its lane; 0 for that of the steps.
    """

    def __init__(self, collective_ops: Any, lane: int = 0):
        self._lane = lane
        self._stock = tf_collectives.launchers(collective_ops)
        self._launchers: dict[tuple[int, tuple[int, ...]], GroupLauncher] = {}

    def answer(self, replica: int, asked: GroupRequest) -> Reply:
        """Return the reply to what a local replica asks for.

        Args:
            replica: index of it among the local ones.
            asked: its request.
        """
        message = asked.message
        if len(asked.members) == 1:
            return reply_of_single_worker(message)
        if not isinstance(message, DenseOrSparse) and 0 in message[0].shape:
            return _nothing(asked)  # TensorFlow's gather of nothing crashes
        launcher = self._launcher(replica, asked)
        if isinstance(message, DenseOrSparse):
            return DenseOrSparseReply(*_either(launcher, asked, message))
        return _ANSWERS[type(message)](launcher, asked, message)

    def count(self) -> dict[Group, list[int]]:
        """Return how many collectives were started and finished, by group of workers.

        What replicas of one worker do among themselves waits for nobody else.
        """
        found: dict[Group, list[int]] = {}
        for group, launcher in self._launchers_of_groups():
            pair = found.get(group, [0, 0])
            more = launcher.counters.read()
            found[group] = [a + b for a, b in zip(pair, more, strict=True)]
        return found

    def pending_keys(self) -> dict[Group, int]:
        """Return the key of the collective that has started and not finished, or 0.

        By the group of workers. Also 0 where several replicas of this worker are in
        collectives of the same workers.
        """
        keys: dict[Group, int] = {}
        for group, launcher in self._launchers_of_groups():
            keys[group] = 0 if group in keys else launcher.counters.pending_key()
        return keys

    def _launchers_of_groups(self) -> Iterator[tuple[Group, GroupLauncher]]:
        """Yield each launcher, after the group of workers that it is for."""
        num_local = len(self._stock)
        for (_, members), launcher in list(self._launchers.items()):
            group = tuple(sorted({member // num_local for member in members}))
            if len(group) > 1:
                yield group, launcher

    @property
    def num_keys(self) -> int:
        """How many keys of collectives are in use."""
        return len(set().union(*(x.kinds for x in self._launchers.values())))

    def _launcher(self, replica: int, asked: GroupRequest) -> GroupLauncher:
        key = replica, asked.members
        if key not in self._launchers:
            rank = asked.members.index(asked.worker)
            place = self._stock[replica], asked.members, rank
            self._launchers[key] = tf_collectives.GroupLauncher(*place, self._lane)
        return self._launchers[key]


def reply_of_single_worker(message: Message) -> Reply:
    """Return the reply to a group of one worker."""
    if isinstance(message, DenseOrSparse):
        return DenseOrSparseReply(message.vector, message.words[tf.newaxis])
    value = message[0]
    return value[tf.newaxis] if isinstance(message, AllGather) else tf.identity(value)


def _nothing(asked: GroupRequest) -> tf.Tensor:
    """Return the reply where there is nothing to ask for."""
    value: Any = asked.message[0]
    if isinstance(asked.message, AllGather):
        return tf.zeros([len(asked.members), *value.shape], value.dtype)
    return tf.identity(value)


def _either(
    launcher: GroupLauncher, asked: GroupRequest, either: DenseOrSparse
) -> tuple[tf.Tensor, tf.Tensor]:
    vector, words = either.vector, either.words
    none = tf.zeros([len(asked.members), 0], tf.int32)
    return smart_cond(
        either.dense,
        lambda: (_sum(launcher, asked, AllReduce(vector)), none),
        lambda: (vector[:0], _gather(launcher, asked, AllGather(words))),
    )


def _sum(launcher: GroupLauncher, asked: GroupRequest, message: AllReduce) -> tf.Tensor:
    if launcher.on_gpu:
        return launcher.all_reduce(message.values)
    return chunks.chunked_all_reduce(launcher.all_reduce, message.values)


def _gather(
    launcher: GroupLauncher, asked: GroupRequest, message: AllGather
) -> tf.Tensor:
    return _rows(launcher, asked, message.words)


def _swap(launcher: GroupLauncher, asked: GroupRequest, message: SendRecv) -> tf.Tensor:
    rows = _rows(launcher, asked, tf.reshape(message.values, [-1]))
    theirs = rows[asked.members.index(message.partner)]
    return _shaped_like(message.values, theirs)


def _rows(launcher: GroupLauncher, asked: GroupRequest, vector: tf.Tensor) -> tf.Tensor:
    """Return the vectors of all members, `[members, n]`."""
    number = len(asked.members)
    if launcher.on_gpu:
        gathered = launcher.all_gather(vector)
    else:
        gathered = chunks.chunked_all_gather(launcher.all_gather, vector, number)
    return tf.reshape(
        gathered, [number, -1 if None in vector.shape else vector.shape[0]]
    )


def _spread(
    launcher: GroupLauncher, asked: GroupRequest, message: AllToAll
) -> tf.Tensor:
    if launcher.on_gpu:
        return launcher.all_to_all(message.rows)
    return chunks.chunked_all_to_all(launcher.all_to_all, message.rows)


def _broadcast(
    launcher: GroupLauncher, asked: GroupRequest, message: Broadcast
) -> tf.Tensor:
    launch = functools.partial(launcher.broadcast, source=message.source)
    if launcher.on_gpu:
        return launch(message.values)
    return chunks.chunked_all_reduce(launch, message.values)


def _shaped_like(values: tf.Tensor, flat: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(values) if None in values.shape else values.shape
    return tf.reshape(flat, shape)


_ANSWERS: dict[type, Any] = {
    AllReduce: _sum,
    AllGather: _gather,
    SendRecv: _swap,
    AllToAll: _spread,
    Broadcast: _broadcast,
}

Bounds: TypeAlias = tuple[int | None, int | None]

SUPPORTED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


class RoutedAlgorithm(NamedTuple):
    """By which exchange something goes.

    Attributes:
        exchange: exchange, the same on all replicas.
        places: place of each local replica.
    """

    exchange: CollectiveAlgorithm
    places: Sequence[Rank]


class CompressedCrossDeviceOps(tf.distribute.CrossDeviceOps):
    """A `tf.distribute.CrossDeviceOps` that also exchanges compressed payloads.

    `communicate` carries a whole step in one collective, `answer` what is asked for
    within a group. Everything else (metrics, `strategy.reduce`, `strategy.gather`)
    falls through to the reduction that was there before.

    Args:
        base: the strategy's own `tf.distribute.CrossDeviceOps`.
        collective_ops: TensorFlow's `CollectiveAllReduce` for the same replicas,
            whose group and instance keys are used.
        lane: number of its lane; 0 for that of the steps.
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

    def count(self) -> dict[Group, list[int]]:
        """Return how many collectives this worker has started and finished.

        By the group of workers that take part.
        """
        return {None: self._counters.read(), **self._groups.count()}

    def pending_keys(self) -> dict[Group, int]:
        """Return the key of the collective that has started and not finished, or 0.

        By the group of workers that take part.
        """
        return {None: self._counters.pending_key(), **self._groups.pending_keys()}

    def communicate(
        self,
        dense: BoolOrTensor,
        vector: Any,
        words: Any,
        bounds: Bounds = (None, None),
        way: RoutedAlgorithm | None = None,
    ) -> tuple[Any, Any]:
        """Sum a dense vector or gather sparse buffers.

        Either is one collective, or one per piece of what is large (`chunks.py`), or
        what an exchange takes. Call it in cross-replica context.

        Args:
            dense: choice between the two, the same on all replicas: a bool, or a
                (per-replica) scalar bool tensor.
            vector: values to be summed, per replica, float `[n]`; used if `dense`.
            words: words to be gathered, per replica, int32 `[w]`, w equal on all; used
                unless `dense`.
            bounds: number of bytes at the most of either, about, where the graph
                computes its shape; without a bound it goes whole then.
            way: exchange by which it goes; None for TensorFlow's own collectives.

        Returns:
            The sum of the vectors, `[n]`, and the gathered buffers, int32
            `[num_replicas * w]`, per replica; what was not exchanged is empty.
        """
        local = tf.distribute.get_strategy().experimental_local_results
        if not isinstance(dense, bool):
            dense = local(dense)[0]
        values = local(vector), local(words)
        if way is None:
            vectors, buffers = self._communicate(dense, *values, bounds)
        else:
            vectors, buffers = self._go(dense, *values, way)
        return tf_collectives.per_replica(vectors), tf_collectives.per_replica(buffers)

    def answer(self, asked: Any) -> Any:
        """Do what is asked for within groups; call it in cross-replica context.

        Args:
            asked: request of each local replica, an `Asked` per replica.

        Returns:
            The replies, per replica.
        """
        local = tf.distribute.get_strategy().experimental_local_results(asked)
        places = range(len(local))

        def answer(_: Any, replica: int) -> Reply:
            return self._groups.answer(replica, local[replica])

        return tf_collectives.per_replica(self._launch(answer, places))

    def abort_message(self, seconds: float) -> str:
        """Return why all collectives of this worker fail, if they do.

        Ask when training cannot go on anyway: see `launching.abort_message`.
        """
        return tf_collectives.abort_message(self.collective_ops, seconds)

    @property
    def num_keys(self) -> int:
        """How many keys of collectives are in use; more steps need no more keys."""
        own = tf_collectives.kinds_of_collectives(self.collective_ops)
        return len(own) + self._groups.num_keys

    def _communicate(
        self, dense: BoolOrTensor, vectors: Any, words: Any, bounds: Bounds
    ) -> tuple[Any, Any]:
        def all_reduce(launcher: Any, vector: tf.Tensor) -> tf.Tensor:
            launch = functools.partial(tf_collectives.launch_all_reduce, launcher)
            if bounds[0] is None or vector.shape.is_fully_defined():
                return launch(vector)
            return chunks.chunked_all_reduce_of_unknown_length(
                launch, vector, bounds[0]
            )

        def gather(launcher: Any, buffer: tf.Tensor) -> tf.Tensor:
            if buffer.shape == [0]:
                return buffer  # nothing is asked for
            launch = functools.partial(tf_collectives.launch_all_gather, launcher)
            if bounds[1] is None or buffer.shape.is_fully_defined():
                return launch(buffer)
            num_replicas = tf_collectives.group_size(launcher)
            return chunks.chunked_all_gather_of_unknown_length(
                launch, buffer, num_replicas, bounds[1]
            )

        return smart_cond(
            dense,
            lambda: (self._launch(all_reduce, vectors), _empty(words)),
            lambda: (_empty(vectors), self._launch(gather, words)),
        )

    def _go(
        self, dense: BoolOrTensor, vectors: Any, words: Any, way: RoutedAlgorithm
    ) -> tuple[Any, Any]:
        exchange, places = way
        return smart_cond(
            dense,
            lambda: (self._run(exchange.sum, vectors, places), _empty(words)),
            lambda: (_empty(vectors), self._run(exchange.gather, words, places)),
        )

    def merge(
        self,
        dense: BoolOrTensor,
        vector: Any,
        words: Any,
        form: BufferLayout,
        way: RoutedAlgorithm,
    ) -> tuple:
        """Sum a dense vector, or merge the entries of sparse buffers.

        Args:
            dense: choice between the two, as in `communicate`.
            vector: values to be summed, as there.
            words: words of a buffer, int32 `[w]`, per replica.
            form: form of them.
            way: exchange that merges.

        Returns:
            The sum and the merged buffer `[w]`, per replica, of which one is empty; and
            which entries of each replica are in it. If the exchange keeps sums, the
            places and values of those that stay with each replica as well.
        """
        local = tf.distribute.get_strategy().experimental_local_results
        exchange, places = way
        dense = dense if isinstance(dense, bool) else local(dense)[0]
        vectors, buffers = local(vector), local(words)

        def merged() -> tuple:
            def merge(words: tf.Tensor, place: Rank) -> MergeSteps:
                return exchange.merge(words, form, place)

            found = self._run(merge, buffers, places)
            words, delivered, left = zip(*found, strict=True)
            kept = zip(*left, strict=True) if exchange.keeps_sums else ()
            return _empty(vectors), words, delivered, *kept

        def summed() -> tuple:
            total = self._run(exchange.sum, vectors, places)
            return total, *(_empty(buffers, dtype) for dtype in _types(way, form))

        found = smart_cond(dense, summed, merged)
        return tuple(map(tf_collectives.per_replica, found))

    def _run(self, rounds: Any, values: Any, places: Sequence[Rank]) -> tuple:
        """Run the rounds of all local replicas; return what each comes to."""
        steps = list(map(rounds, values, places))
        return tuple(run_together(steps, self.answer_each(places)))

    def answer_each(self, places: Sequence[Rank]) -> Any:
        """Return what answers a round of all local replicas.

        Args:
            places: place of each.
        """

        def answer(asked: Sequence[Sequence[Primitive]]) -> list[list[Reply]]:
            def answer_one(_: Any, replica: int) -> list[Reply]:
                return [
                    self._groups.answer(
                        replica, GroupRequest(message, *places[replica])
                    )
                    for message in asked[replica]
                ]

            return list(self._launch(answer_one, range(len(places))))

        return answer

    def _launch(self, launch: Any, values: Any) -> tuple[tf.Tensor, ...]:
        with tf_collectives.launch_lock(self.collective_ops):
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


def cross_device_ops(strategy: tf.distribute.Strategy) -> CompressedCrossDeviceOps:
    """Return the hook of this strategy, installing it at the first call."""
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
            "This strategy mixes kinds of devices, for which TensorFlow has no "
            "collectives. Use devices of one kind. "
            f"Received: devices={strategy.extended.worker_devices}"
        )
    hook = CompressedCrossDeviceOps(current, collective_ops)
    tf_collectives.set_cross_device_ops(strategy, hook)
    return hook


def _types(way: RoutedAlgorithm, form: BufferLayout) -> list[tf.DType]:
    """Return the dtypes of what comes of a merge."""
    kept = [tf.int32, FlatIndexSpace(form).dtype] if way.exchange.keeps_sums else []
    return [tf.int32, tf.bool, *kept]


def _empty(values: Any, dtype: tf.DType | None = None) -> tuple[tf.Tensor, ...]:
    return tuple(tf.zeros([0], dtype or v.dtype) for v in values)
