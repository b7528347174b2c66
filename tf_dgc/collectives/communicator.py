"""The communicator: runs a step implementation and answers its requests."""

from collections.abc import Generator
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc.collectives import CollectiveAlgorithm, Ring
from tf_dgc.collectives.algorithm import Rank
from tf_dgc.collectives.cross_device import (
    CompressedCrossDeviceOps,
    RoutedAlgorithm,
    compressed,
    compressed_cross_device_ops,
    reply_of_single_worker,
)
from tf_dgc.collectives.requests import (
    AllGather,
    AllReduce,
    BufferLayout,
    DenseOrSparse,
    DenseOrSparseReply,
    Remainder,
    Reply,
    Request,
    group_members,
)
from tf_dgc.multiworker import workers
from tf_dgc.multiworker.cross_device import GroupRequest, WorkerCrossDeviceOps
from tf_dgc.multiworker.divergence import ChecksumComparison

Outcome = TypeVar("Outcome")


class Communicator:
    """Answers requests with the collectives of a strategy.

    With one replica it sends nothing and replies as in a cluster of one worker. Without
    an algorithm it uses TensorFlow's own collectives; without a hook, the strategy's
    cross-device operations.
    """

    drops_entries = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        algorithm: CollectiveAlgorithm | None = None,
        hook: WorkerCrossDeviceOps | None = None,
    ):
        self.num_workers: int = strategy.num_replicas_in_sync
        self._hook: CompressedCrossDeviceOps | None = None
        if hook is not None:
            self._hook = compressed(hook)
        elif self.num_workers > 1:
            self._hook = compressed_cross_device_ops(strategy)
        self._algorithm: CollectiveAlgorithm | None = None
        if self._hook and algorithm:
            self.use_algorithm(algorithm.resolve(workers.hosts(strategy)))

    def use_algorithm(self, algorithm: CollectiveAlgorithm) -> None:
        """Switch to a result of `CollectiveAlgorithm.resolve`, equal on all workers."""
        # Subclasses of Ring may override its methods, so compare the exact type.
        is_stock = type(algorithm) is Ring or algorithm.is_neighbor_exchange
        self._algorithm = None if is_stock else algorithm
        self.drops_entries = algorithm.drops_entries

    def run(
        self,
        step: Generator[list[Request], list[Reply], Outcome],
        check: ChecksumComparison | None = None,
    ) -> tuple[Outcome, int | tf.Tensor]:
        """Run a step round by round; call it in replica context.

        The check shares the first request's collective; its bytes are also returned.
        """
        check_bytes: int | tf.Tensor = 0
        replies: Any = None
        while True:
            try:
                requests = step.send(replies)
            except StopIteration as end:
                return end.value, check_bytes
            if check:
                check_bytes = self._check_bytes(check, requests[0])
            replies = [
                self.answer(request, None if i else check)
                for i, request in enumerate(requests)
            ]
            check = None

    def answer(
        self, request: Request, check: ChecksumComparison | None = None
    ) -> Reply:
        """Return the reply to one request; call it in replica context.

        The request must have the same type, dtype and size on all workers. A `check`
        shares its collective.
        """
        if check and not self._can_carry_check(request):
            with tf.control_dependencies([self._run_check_alone(check)]):
                return self.answer(request)
        if not _is_for_all_workers(request):
            return self._answer_in_group(request)
        reply = self._answer_dense_or_sparse(_as_dense_or_sparse(request), check)
        if isinstance(request, DenseOrSparse):
            return reply
        return reply.total if isinstance(request, AllReduce) else reply.buffers

    def node_workers(self) -> tuple[int, ...]:
        """Return `node_of` this worker; call it in replica context."""
        if self._hook is None or self._algorithm is None:
            return (0,)
        return self._algorithm.node_of(self._rank().worker)

    def _can_carry_check(self, request: Request) -> bool:
        return _is_for_all_workers(request) and not self._merges(request)

    def _check_bytes(self, check: ChecksumComparison, request: Request) -> tf.Tensor:
        if not self._can_carry_check(request):
            return check.num_bytes(True, tf.float32)
        request = _as_dense_or_sparse(request)
        return check.num_bytes(request.dense, request.vector.dtype)

    def _run_check_alone(self, check: ChecksumComparison) -> tf.Tensor:
        """Give the check a collective of its own in the steps where it is due."""
        no_words = tf.zeros([0], tf.int32)
        vector, _ = check.board(True, tf.zeros([0]), no_words)
        request = DenseOrSparse(check.due, vector, no_words)
        reply = self._answer_dense_or_sparse(request)
        return check.leave(True, reply.total, reply.buffers)[0]

    def _answer_in_group(self, request: Request) -> Reply:
        if isinstance(request, DenseOrSparse):
            return self._answer_dense_or_sparse_in_group(request)
        hook = self._hook
        if hook is None:
            group_members(request, 0, 1)  # raises for an invalid group
            return reply_of_single_worker(request)
        rank = self._rank()
        group_request = GroupRequest(request, rank.worker, rank.num_workers)
        context = tf.distribute.get_replica_context()
        return context.merge_call(lambda _, r: hook.answer(r), args=(group_request,))

    def _answer_dense_or_sparse_in_group(
        self, request: DenseOrSparse
    ) -> DenseOrSparseReply:
        hook, dense = self._hook, request.dense
        total = AllReduce(request.vector, request.group)
        gather = AllGather(request.words, request.group)
        if hook is None:
            group_members(gather, 0, 1)  # raises for an invalid group
            return DenseOrSparseReply(request.vector, request.words[tf.newaxis])
        rank = self._rank()
        group_requests = [
            GroupRequest(x, rank.worker, rank.num_workers) for x in (total, gather)
        ]
        context = tf.distribute.get_replica_context()
        sums, buffers = context.merge_call(
            lambda _, *args: hook.communicate_in_groups(*args),
            args=(dense, *group_requests),
        )
        return DenseOrSparseReply(sums, buffers)

    def _rank(self) -> Rank:
        context = tf.distribute.get_replica_context()
        worker = tf.get_static_value(context.replica_id_in_sync_group)
        return Rank(int(worker), self.num_workers)

    def _answer_dense_or_sparse(
        self, request: DenseOrSparse, check: ChecksumComparison | None = None
    ) -> DenseOrSparseReply:
        dense, vector, words = request.dense, request.vector, request.words
        hook = self._hook
        if hook is None:
            return DenseOrSparseReply(vector, words[tf.newaxis])
        if request.layout is not None and self._merges(request):
            return self._merge(request, request.layout)

        max_vector_bytes, max_words_bytes = None, request.max_bytes
        if request.entries is not None:
            max_vector_bytes = request.entries * vector.dtype.size
            if max_words_bytes is None:
                max_words_bytes = max_vector_bytes
        # A closure: as an argument of `merge_call`, bounds would be one per replica.
        bounds = (
            _num_bytes(vector, max_vector_bytes),
            _num_bytes(words, max_words_bytes),
        )

        def communicate(
            strategy: Any, dense: Any, vector: Any, words: Any, worker: Any
        ) -> Any:
            algorithm = self._routed_algorithm(strategy, worker)
            return hook.communicate(dense, vector, words, bounds, algorithm)

        if check:
            vector, words = check.board(dense, vector, words)
        context = tf.distribute.get_replica_context()
        worker = self._rank().worker if self._algorithm else 0
        args = (dense, vector, words, worker)
        total, buffers = context.merge_call(communicate, args=args)
        buffers = tf.reshape(buffers, [self.num_workers, -1])
        if check:
            total, buffers = check.leave(dense, total, buffers)
            total.set_shape(request.vector.shape)
            buffers.set_shape([None, *request.words.shape])
        return DenseOrSparseReply(total, buffers)

    def _merge(
        self, request: DenseOrSparse, layout: BufferLayout
    ) -> DenseOrSparseReply:
        hook: Any = self._hook

        def merge(
            strategy: Any, dense: Any, vector: Any, words: Any, worker: Any
        ) -> Any:
            algorithm = self._routed_algorithm(strategy, worker)
            return hook.merge(dense, vector, words, layout, algorithm)

        context = tf.distribute.get_replica_context()
        args = (request.dense, request.vector, request.words, self._rank().worker)
        total, buffer, delivered, *dropped = context.merge_call(merge, args=args)
        total.set_shape(request.vector.shape)
        buffers = tf.reshape(buffer, [1, -1])
        remainder = Remainder(*dropped) if dropped else None
        return DenseOrSparseReply(total, buffers, delivered, remainder)

    def _merges(self, request: Request) -> bool:
        merges = self._algorithm is not None and self._algorithm.drops_entries
        return merges and getattr(request, "layout", None) is not None

    def _routed_algorithm(
        self, strategy: tf.distribute.Strategy, worker: Any
    ) -> RoutedAlgorithm | None:
        if self._algorithm is None:
            return None
        local = strategy.experimental_local_results(worker)
        ranks = [Rank(w, self.num_workers) for w in local]
        return RoutedAlgorithm(self._algorithm, ranks)


def _is_for_all_workers(request: Request) -> bool:
    return (
        isinstance(request, DenseOrSparse | AllReduce | AllGather)
        and request.group is None
    )


def _as_dense_or_sparse(request: Request) -> DenseOrSparse:
    if isinstance(request, DenseOrSparse):
        return request
    if isinstance(request, AllReduce):
        return DenseOrSparse(True, request.values, tf.zeros([0], tf.int32))
    return DenseOrSparse(False, tf.zeros([0]), request[0])


def _num_bytes(tensor: tf.Tensor, upper_bound: int | None) -> int | None:
    """Return the bytes of a tensor; the bound if its shape is not known statically."""
    entries = tensor.shape.num_elements()
    return upper_bound if entries is None else entries * tensor.dtype.size
