"""Cross-device operations that also exchange compressed gradients."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from tf_dgc._internals import tf_collectives
from tf_dgc.collectives.algorithm import (
    CollectiveAlgorithm,
    MergeSteps,
    Rank,
    run_together,
)
from tf_dgc.collectives.requests import (
    BufferLayout,
    DenseOrSparse,
    DenseOrSparseReply,
    Reply,
    Request,
)
from tf_dgc.collectives.sparse_merge import FlatIndexSpace
from tf_dgc.conditions import BoolOrTensor, smart_cond
from tf_dgc.multiworker.cross_device import (
    Tensors,
    WorkerCrossDeviceOps,
    cross_device_ops,
    reply_in_group_of_one,
)

Outcome = TypeVar("Outcome")

Bounds: TypeAlias = tuple[int | None, int | None]
"""Upper bounds of the bytes of a vector and of words; None without a bound."""


class RoutedAlgorithm(NamedTuple):
    """A collective algorithm and the ranks of the local replicas in it."""

    algorithm: CollectiveAlgorithm
    ranks: Sequence[Rank]


class CompressedCrossDeviceOps(WorkerCrossDeviceOps):
    """A `tf.distribute.CrossDeviceOps` that also exchanges compressed payloads.

    The optimizers of this package install it in their strategy. `communicate` runs a
    whole step in one collective. Everything else (metrics, `strategy.reduce`,
    `strategy.gather`) is delegated to the strategy's original operations, `base`.
    """

    def communicate(
        self,
        dense: BoolOrTensor,
        vector: Any,
        words: Any,
        bounds: Bounds = (None, None),
        algorithm: RoutedAlgorithm | None = None,
    ) -> tuple[Any, Any]:
        """Sum `[n]` or gather int32 `[w]`; call it in cross-replica context.

        Takes one collective, or one per chunk of a large tensor, or the rounds of an
        algorithm (None for TensorFlow's own). `dense` is the same on all replicas.
        `bounds` are those of the bytes of both, for shapes known only at run time: such
        a tensor is sent in one piece if it has no bound. Returns the sum and the
        gathered buffers, int32 `[num_replicas * w]`, per replica; one of them is empty.
        """
        local = tf.distribute.get_strategy().experimental_local_results
        if not isinstance(dense, bool):
            dense = local(dense)[0]
        vectors, buffers = local(vector), local(words)

        def summed() -> tuple[Tensors, Tensors]:
            if algorithm is None:
                total = self.all_reduce(vectors, bounds[0])
            else:
                total = self._sum_with_algorithm(vectors, algorithm)
            return total, _empty(buffers)

        def gathered() -> tuple[Tensors, Tensors]:
            if algorithm is None:
                rows = self.all_gather(buffers, bounds[1])
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
        """Sum a dense vector or merge the entries of sparse buffers, as `communicate`.

        Returns per replica the sum and the merged buffer `[w]`, one of them empty, and
        a mask of the replica's entries that were delivered. If the algorithm
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

    def communicate_in_groups(
        self, dense: BoolOrTensor, sums: Any, gathers: Any
    ) -> tuple[Any, Any]:
        """Sum a dense vector or gather sparse buffers within groups.

        Takes an `AllReduce` and an `AllGather` of one group per replica. Returns per
        replica the sum and the buffers, int32 `[members, w]`; one of them is empty.
        """
        local = tf.distribute.get_strategy().experimental_local_results
        if not isinstance(dense, bool):
            dense = local(dense)[0]

        def summed() -> tuple[Tensors, Tensors]:
            num_members = [len(gather.members) for gather in local(gathers)]
            no_rows = tuple(tf.zeros([n, 0], tf.int32) for n in num_members)
            return local(self.answer(sums)), no_rows

        def gathered() -> tuple[Tensors, Tensors]:
            vectors = [group_request.request.values for group_request in local(sums)]
            return _empty(vectors), local(self.answer(gathers))

        total, rows = smart_cond(dense, summed, gathered)
        return tf_collectives.per_replica(total), tf_collectives.per_replica(rows)

    def run_steps(
        self,
        steps: Sequence[Generator[Any, Any, Outcome]],
        ranks: Sequence[Rank],
    ) -> list[Outcome]:
        """Run the generators of all local replicas; return their results."""
        return run_together(steps, lambda requests: self.answer_round(requests, ranks))

    def _sum_with_algorithm(self, vectors: Any, algorithm: RoutedAlgorithm) -> Tensors:
        steps = list(map(algorithm.algorithm.sum, vectors, algorithm.ranks))
        return tuple(self.run_steps(steps, algorithm.ranks))

    def _gather_with_algorithm(
        self, buffers: Any, algorithm: RoutedAlgorithm
    ) -> Tensors:
        steps = list(map(algorithm.algorithm.gather, buffers, algorithm.ranks))
        return tuple(self.run_steps(steps, algorithm.ranks))


def compressed(hook: WorkerCrossDeviceOps) -> CompressedCrossDeviceOps:
    """Return operations with the base, counters and groups of others."""
    if isinstance(hook, CompressedCrossDeviceOps):
        return hook
    return CompressedCrossDeviceOps(
        hook.base, hook.collective_ops, hook.counters, hook.groups
    )


def compressed_cross_device_ops(
    strategy: tf.distribute.Strategy,
) -> CompressedCrossDeviceOps:
    """Return the strategy's `CompressedCrossDeviceOps`; the first call installs it."""
    hook = compressed(cross_device_ops(strategy))
    tf_collectives.set_cross_device_ops(strategy, hook)
    return hook


def reply_of_single_worker(request: Request) -> Reply:
    """Return the reply in a cluster of one worker."""
    if isinstance(request, DenseOrSparse):
        return DenseOrSparseReply(request.vector, request.words[tf.newaxis])
    return reply_in_group_of_one(request)


def _empty(values: Any, dtype: tf.DType | None = None) -> Tensors:
    return tuple(tf.zeros([0], dtype or v.dtype) for v in values)
