"""The communicator: does what steps ask for, over the workers of a strategy."""

from collections.abc import Generator
from typing import Any, TypeVar

import tensorflow as tf

from tf_dgc.collectives.requests import Both, Either, Message, Reply, Sum, Swap
from tf_dgc.distribute import cross_device
from tf_dgc.distribute.divergence import Check

Outcome = TypeVar("Outcome")


class Communicator:
    """Answers requests by the cross-device hook of a strategy.

    Args:
        strategy: strategy in whose replica context it is called. With one replica
            nothing is sent, and the replies are as if there were a cluster of one.

    Attributes:
        num_workers: number of replicas in sync, N.
        drops_entries: whether entries may be left out on the way, as `Both` says.
    """

    drops_entries = False

    def __init__(self, strategy: tf.distribute.Strategy):
        self.num_workers: int = strategy.num_replicas_in_sync
        self._hook = (
            cross_device.cross_device_ops(strategy) if self.num_workers > 1 else None
        )

    def run(
        self,
        step: Generator[list[Message], list[Reply], Outcome],
        check: Check | None = None,
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
                first = _as_either(requests[0])
                extra = check.num_bytes(first.dense, first.vector.dtype)
            replies = [self.answer(requests[0], check)]
            replies += [self.answer(request) for request in requests[1:]]
            check = None

    def answer(self, request: Message, check: Check | None = None) -> Reply:
        """Return the reply to one request; call it in replica context.

        Args:
            request: request of the same kind, dtype and size on all workers.
            check: rider of it; None for none.

        Raises:
            ValueError: for groups of workers and for swaps, which the hook has none of.
        """
        either = _as_either(request)
        reply = self._choose(either, check)
        if isinstance(request, Either):
            return reply
        return reply[0 if either.dense else 1]

    def _choose(self, either: Either, check: Check | None) -> Both:
        dense, vector, words, entries, _ = either
        hook = self._hook
        if hook is None:
            return Both(vector, words[tf.newaxis])

        def communicate(_: Any, dense: Any, vector: Any, words: Any) -> Any:
            # As arguments, there would be one bound for each replica.
            return hook.communicate(dense, vector, words, bounds)

        at_most = None if entries is None else entries * vector.dtype.size
        bounds = _num_bytes(vector, at_most), _num_bytes(words, at_most)
        context = tf.distribute.get_replica_context()
        message = check.board(dense, vector, words) if check else (vector, words)
        total, buffers = context.merge_call(communicate, args=(dense, *message))
        buffers = tf.reshape(buffers, [self.num_workers, -1])
        if check:
            total, buffers = check.leave(dense, total, buffers)
            total.set_shape(vector.shape)
            buffers.set_shape([None, *words.shape])
        return Both(total, buffers)


def _as_either(request: Message) -> Either:
    if isinstance(request, Swap) or request.group is not None:
        raise ValueError(
            "This communicator knows collectives of all workers only. Ask for a "
            "`Sum`, a `Gather` or `Either` without a group, or give the optimizer "
            f"another `communicator`. Received: {request!r}"
        )
    if isinstance(request, Either):
        return request
    if isinstance(request, Sum):
        return Either(True, request.values, tf.zeros([0], tf.int32))
    return Either(False, tf.zeros([0]), request.words)


def _num_bytes(tensor: tf.Tensor, otherwise: int | None) -> int | None:
    """Return the size of a tensor, if it is known while tracing."""
    entries = tensor.shape.num_elements()
    return otherwise if entries is None else entries * tensor.dtype.size
