"""The cross-device hook: a strategy's reduction that also exchanges payloads."""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tf_dgc._internals import launching, mirrored
from tf_dgc.arguments import show
from tf_dgc.choice import Choice, choose
from tf_dgc.cluster.positions import Group
from tf_dgc.collectives.lockstep import run_together
from tf_dgc.collectives.requests import Form, Primitive, Reply
from tf_dgc.collectives.space import Space
from tf_dgc.distribute import pieces
from tf_dgc.distribute.groups import Asked, Groups
from tf_dgc.exchanges.base import Exchange, MergeRounds, Place

Bounds: TypeAlias = tuple[int | None, int | None]

SUPPORTED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
)


class Way(NamedTuple):
    """By which exchange something goes.

    Attributes:
        exchange: exchange, the same on all replicas.
        places: place of each local replica.
    """

    exchange: Exchange
    places: Sequence[Place]


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
        self._launchers = launching.launchers(collective_ops)
        self._counters = launching.reuse_collective_keys(collective_ops)
        launching.wrap_launches(collective_ops, pieces.all_reduce, pieces.all_gather)
        self._groups = Groups(collective_ops, lane)

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
        dense: Choice,
        vector: Any,
        words: Any,
        bounds: Bounds = (None, None),
        way: Way | None = None,
    ) -> tuple[Any, Any]:
        """Sum a dense vector or gather sparse buffers.

        Either is one collective, or one per piece of what is large (`pieces.py`), or
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
        return mirrored.per_replica(vectors), mirrored.per_replica(buffers)

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

        return mirrored.per_replica(self._launch(answer, places))

    def abort_message(self, seconds: float) -> str:
        """Return why all collectives of this worker fail, if they do.

        Ask when training cannot go on anyway: see `launching.abort_message`.
        """
        return launching.abort_message(self.collective_ops, seconds)

    @property
    def num_keys(self) -> int:
        """How many keys of collectives are in use; more steps need no more keys."""
        own = launching.kinds_of_collectives(self.collective_ops)
        return len(own) + self._groups.num_keys

    def _communicate(
        self, dense: Choice, vectors: Any, words: Any, bounds: Bounds
    ) -> tuple[Any, Any]:
        def all_reduce(launcher: Any, vector: tf.Tensor) -> tf.Tensor:
            launch = functools.partial(launching.launch_all_reduce, launcher)
            if bounds[0] is None or vector.shape.is_fully_defined():
                return launch(vector)
            return pieces.all_reduce_about(launch, vector, bounds[0])

        def gather(launcher: Any, buffer: tf.Tensor) -> tf.Tensor:
            if buffer.shape == [0]:
                return buffer  # nothing is asked for
            launch = functools.partial(launching.launch_all_gather, launcher)
            if bounds[1] is None or buffer.shape.is_fully_defined():
                return launch(buffer)
            num_replicas = launching.group_size(launcher)
            return pieces.all_gather_at_most(launch, buffer, num_replicas, bounds[1])

        return choose(
            dense,
            lambda: (self._launch(all_reduce, vectors), _empty(words)),
            lambda: (_empty(vectors), self._launch(gather, words)),
        )

    def _go(self, dense: Choice, vectors: Any, words: Any, way: Way) -> tuple[Any, Any]:
        exchange, places = way
        return choose(
            dense,
            lambda: (self._run(exchange.sum, vectors, places), _empty(words)),
            lambda: (_empty(vectors), self._run(exchange.gather, words, places)),
        )

    def merge(
        self, dense: Choice, vector: Any, words: Any, form: Form, way: Way
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
            def merge(words: tf.Tensor, place: Place) -> MergeRounds:
                return exchange.merge(words, form, place)

            found = self._run(merge, buffers, places)
            words, delivered, left = zip(*found, strict=True)
            kept = zip(*left, strict=True) if exchange.keeps_sums else ()
            return _empty(vectors), words, delivered, *kept

        def summed() -> tuple:
            total = self._run(exchange.sum, vectors, places)
            return total, *(_empty(buffers, dtype) for dtype in _types(way, form))

        found = choose(dense, summed, merged)
        return tuple(map(mirrored.per_replica, found))

    def _run(self, rounds: Any, values: Any, places: Sequence[Place]) -> tuple:
        """Run the rounds of all local replicas; return what each comes to."""
        steps = list(map(rounds, values, places))
        return tuple(run_together(steps, self.answer_each(places)))

    def answer_each(self, places: Sequence[Place]) -> Any:
        """Return what answers a round of all local replicas.

        Args:
            places: place of each.
        """

        def answer(asked: Sequence[Sequence[Primitive]]) -> list[list[Reply]]:
            def answer_one(_: Any, replica: int) -> list[Reply]:
                return [
                    self._groups.answer(replica, Asked(message, *places[replica]))
                    for message in asked[replica]
                ]

            return list(self._launch(answer_one, range(len(places))))

        return answer

    def _launch(self, launch: Any, values: Any) -> tuple[tf.Tensor, ...]:
        with launching.launch_lock(self.collective_ops):
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
    current = mirrored.get_cross_device_ops(strategy)
    if isinstance(current, CompressedCrossDeviceOps):
        return current
    collective_ops = mirrored.collective_ops_of(strategy)
    if collective_ops is None:
        raise ValueError(
            "This strategy mixes kinds of devices, for which TensorFlow has no "
            "collectives. Use devices of one kind. "
            f"Received: devices={strategy.extended.worker_devices}"
        )
    hook = CompressedCrossDeviceOps(current, collective_ops)
    mirrored.set_cross_device_ops(strategy, hook)
    return hook


def _types(way: Way, form: Form) -> list[tf.DType]:
    """Return the dtypes of what comes of a merge."""
    kept = [tf.int32, Space(form).dtype] if way.exchange.keeps_sums else []
    return [tf.int32, tf.bool, *kept]


def _empty(values: Any, dtype: tf.DType | None = None) -> tuple[tf.Tensor, ...]:
    return tuple(tf.zeros([0], dtype or v.dtype) for v in values)
