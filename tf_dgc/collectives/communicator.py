"""The communicator: does what steps ask for, over the workers of a strategy."""

from collections.abc import Generator
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc.collectives import CollectiveAlgorithm, Ring, cross_device
from tf_dgc.collectives.algorithm import Rank
from tf_dgc.collectives.cross_device import (
    CompressedCrossDeviceOps,
    GroupRequest,
    RoutedAlgorithm,
    reply_of_single_worker,
)
from tf_dgc.collectives.requests import (
    AllGather,
    AllReduce,
    BufferLayout,
    DenseOrSparse,
    DenseOrSparseReply,
    Message,
    Remainder,
    Reply,
    group_members,
)
from tf_dgc.multiworker import workers
from tf_dgc.multiworker.divergence import DivergenceCheck

Outcome = TypeVar("Outcome")


class Communicator:
    """Answers requests by the cross-device hook of a strategy.

    Args:
        strategy: strategy in whose replica context it is called. With one replica
            nothing is sent, and the replies are as if there were a cluster of one.
        exchange: exchange by which sums and gathers of all workers go; None for
            TensorFlow's own collectives.
        hook: hook by which it answers; None for the strategy's.

    Attributes:
        num_workers: number of replicas in sync, N.
        drops_entries: whether entries may be left out on the way, as `Both` says.

    Raises:
        ValueError: for an exchange that these workers cannot have.
    """

    drops_entries = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        exchange: CollectiveAlgorithm | None = None,
        hook: CompressedCrossDeviceOps | None = None,
    ):
        self.num_workers: int = strategy.num_replicas_in_sync
        if hook is None and self.num_workers > 1:
            hook = cross_device.cross_device_ops(strategy)
        self._hook = hook
        self._exchange: CollectiveAlgorithm | None = None
        if self._hook and exchange:
            self.use_algorithm(exchange.settle(workers.hosts(strategy)))

    def use_algorithm(self, exchange: CollectiveAlgorithm) -> None:
        """Let sums and gathers of all workers go by another exchange from now on.

        Args:
            exchange: exchange that is settled, the same on all workers.
        """
        # What is made from it has ways of its own, but for sums and gathers of all.
        stock = type(exchange) is Ring or exchange.is_neighbor_exchange
        self._exchange = None if stock else exchange
        self.drops_entries = exchange.drops_entries

    def run(
        self,
        step: Generator[list[Message], list[Reply], Outcome],
        check: DivergenceCheck | None = None,
    ) -> tuple[Outcome, int | tf.Tensor]:
        """Do what a step asks for, round after round; call it in replica context.

        Args:
            step: generator that yields the requests of a round, and gets as many
                replies.
            check: rider of the first request; None for none.

        Returns:
            What the step returns, and the bytes that the check took.
        """
        extra: int | tf.Tensor = 0
        replies: Any = None
        while True:
            try:
                requests = step.send(replies)
            except StopIteration as end:
                return end.value, extra
            if check:
                extra = self._bytes_of(check, requests[0])
            replies = [
                self.answer(r, None if i else check) for i, r in enumerate(requests)
            ]
            check = None

    def answer(self, request: Message, check: DivergenceCheck | None = None) -> Reply:
        """Return the reply to one request; call it in replica context.

        Args:
            request: request of the same kind, dtype and size on all workers.
            check: rider of it; None for none.

        Raises:
            ValueError: for groups and partners that cannot be, as
                `collectives.groups.members_of`.
        """
        if check and not self._carries(request):
            with tf.control_dependencies([self._compare(check)]):
                return self.answer(request)
        if _is_of_all(request):
            return _reply(request, self._choose(_as_either(request), check))
        return self._within(request)

    def machine(self) -> tuple[int, ...]:
        """Return the workers that add up their gradients before they compress.

        Ascending, this one among them; call it in replica context.
        """
        if self._hook is None or self._exchange is None:
            return (0,)
        return self._exchange.node_of(self._place().worker)

    def _carries(self, request: Message) -> bool:
        """Whether a check can ride on it: on one collective of all, not on merges."""
        return _is_of_all(request) and not self._merges(request)

    def _bytes_of(self, check: DivergenceCheck, request: Message) -> tf.Tensor:
        if not self._carries(request):
            return check.num_bytes(True, tf.float32)
        either = _as_either(request)
        return check.num_bytes(either.dense, either.vector.dtype)

    def _compare(self, check: DivergenceCheck) -> tf.Tensor:
        """Let the check have a collective of its own in steps that ask."""
        nothing = tf.zeros([0]), tf.zeros([0], tf.int32)
        vector, _ = check.board(True, *nothing)
        total, buffers, *_ = self._choose(DenseOrSparse(check.due, vector, nothing[1]))
        return check.leave(True, total, buffers)[0]

    def _within(self, request: Message) -> Reply:
        hook = self._hook
        if hook is None:
            group_members(request, 0, 1)
            return reply_of_single_worker(request)
        asked = GroupRequest(request, *self._place())
        context = tf.distribute.get_replica_context()
        return context.merge_call(lambda _, a: hook.answer(a), args=(asked,))

    def _place(self) -> Rank:
        context = tf.distribute.get_replica_context()
        worker = tf.get_static_value(context.replica_id_in_sync_group)
        return Rank(int(worker), self.num_workers)

    def _choose(
        self, either: DenseOrSparse, check: DivergenceCheck | None = None
    ) -> DenseOrSparseReply:
        dense, vector, words, entries, _, form, most_bytes = either
        hook = self._hook
        if hook is None:
            return DenseOrSparseReply(vector, words[tf.newaxis])
        if form is not None and self._merges(either):
            return self._merge(either, form)

        def communicate(
            strategy: Any, dense: Any, vector: Any, words: Any, worker: Any
        ) -> Any:
            # As arguments, there would be one bound for each replica.
            way = self._way(strategy, worker)
            return hook.communicate(dense, vector, words, bounds, way)

        at_most = None if entries is None else entries * vector.dtype.size
        most_bytes = at_most if most_bytes is None else most_bytes
        bounds = _num_bytes(vector, at_most), _num_bytes(words, most_bytes)
        context = tf.distribute.get_replica_context()
        message = check.board(dense, vector, words) if check else (vector, words)
        worker = self._place().worker if self._exchange else 0
        args = (dense, *message, worker)
        total, buffers = context.merge_call(communicate, args=args)
        buffers = tf.reshape(buffers, [self.num_workers, -1])
        if check:
            total, buffers = check.leave(dense, total, buffers)
            total.set_shape(vector.shape)
            buffers.set_shape([None, *words.shape])
        return DenseOrSparseReply(total, buffers)

    def _merge(self, either: DenseOrSparse, form: BufferLayout) -> DenseOrSparseReply:
        hook: Any = self._hook

        def merge(
            strategy: Any, dense: Any, vector: Any, words: Any, worker: Any
        ) -> Any:
            way = self._way(strategy, worker)
            return hook.merge(dense, vector, words, form, way)

        dense, vector, words = either[:3]
        context = tf.distribute.get_replica_context()
        args = (dense, vector, words, self._place().worker)
        total, buffer, delivered, *left = context.merge_call(merge, args=args)
        total.set_shape(vector.shape)
        buffers = tf.reshape(buffer, [1, -1])
        return DenseOrSparseReply(
            total, buffers, delivered, Remainder(*left) if left else None
        )

    def _merges(self, request: Message) -> bool:
        merges = self._exchange is not None and self._exchange.drops_entries
        return merges and getattr(request, "form", None) is not None

    def _way(
        self, strategy: tf.distribute.Strategy, worker: Any
    ) -> RoutedAlgorithm | None:
        """Return the exchange with the places of all local replicas."""
        if self._exchange is None:
            return None  # TensorFlow's own
        local = strategy.experimental_local_results(worker)
        return RoutedAlgorithm(
            self._exchange, [Rank(w, self.num_workers) for w in local]
        )


def _is_of_all(request: Message) -> bool:
    """Whether it is one collective of all workers, or a choice of two."""
    return (
        isinstance(request, DenseOrSparse | AllReduce | AllGather)
        and request.group is None
    )


def _as_either(request: Message) -> DenseOrSparse:
    if isinstance(request, DenseOrSparse):
        return request
    if isinstance(request, AllReduce):
        return DenseOrSparse(True, request.values, tf.zeros([0], tf.int32))
    return DenseOrSparse(False, tf.zeros([0]), request[0])


def _reply(request: Message, both: DenseOrSparseReply) -> Reply:
    if isinstance(request, DenseOrSparse):
        return both
    return both.total if isinstance(request, AllReduce) else both.buffers


def _num_bytes(tensor: tf.Tensor, otherwise: int | None) -> int | None:
    """Return the size of a tensor, if it is known while tracing."""
    entries = tensor.shape.num_elements()
    return otherwise if entries is None else entries * tensor.dtype.size
