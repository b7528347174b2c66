"""Exchange: the collectives of a step, over the cross-device hook."""

from typing import Any

import tensorflow as tf

from tf_dgc import distribute
from tf_dgc.choice import Choice
from tf_dgc.compressors.base import Gather, Sum
from tf_dgc.divergence import Check
from tf_dgc.rounds import Outcome, Rounds


class Exchange:
    """Sums vectors or gathers buffers over the workers of a strategy.

    Args:
        strategy: in whose replica context it is called. With one replica nothing is
            sent, and the results are as if there were a cluster of one.

    Attributes:
        num_workers: replicas in sync, N.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.num_workers: int = strategy.num_replicas_in_sync
        self._hook = (
            distribute.cross_device_ops(strategy) if self.num_workers > 1 else None
        )

    def __call__(
        self,
        dense: Choice,
        vector: tf.Tensor,
        words: tf.Tensor,
        check: Check | None = None,
        entries: int | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Do one of two collectives; call it in replica context.

        Args:
            dense: whether to sum `vector` (else `words` is gathered), equal on all
                workers; a bool, or a scalar bool tensor decided at run time.
            vector: float `[n]`.
            words: int32 `[w]`, w equal on all workers.
            check: travels with it.
            entries: n, where the graph computes the shapes of both; `words` has no
                more bytes than `vector` then.

        Returns:
            The sum `[n]`, and the buffers, int32 `[num_workers, w]`. The one that was
            not asked for is empty.
        """
        hook = self._hook
        if hook is None:
            return vector, words[tf.newaxis]

        def exchange(_: Any, dense: Choice, vector: Any, words: Any) -> Any:
            # As arguments, there would be one bound for each replica.
            return hook.exchange(dense, vector, words, bounds)

        at_most = None if entries is None else entries * vector.dtype.size
        bounds = _num_bytes(vector, at_most), _num_bytes(words, at_most)
        context = tf.distribute.get_replica_context()
        message = check.board(dense, vector, words) if check else (vector, words)
        total, buffers = context.merge_call(exchange, args=(dense, *message))
        buffers = tf.reshape(buffers, [self.num_workers, -1])
        if check:
            total, buffers = check.leave(dense, total, buffers)
            total.set_shape(vector.shape)
            buffers.set_shape([None, *words.shape])
        return total, buffers

    def run(self, rounds: Rounds, check: Check | None = None) -> Outcome:
        """Do the collectives that all rounds of a step ask for.

        Args:
            rounds: of the step.
            check: travels with the first collective.
        """
        extra: int | tf.Tensor = 0
        try:
            messages = next(rounds)
            while True:
                if check:
                    extra = check.num_bytes(
                        isinstance(messages[0], Sum), messages[0][0].dtype
                    )
                first, check = check, None
                replies = [self._answer(messages[0], first)]
                replies += [self._answer(message) for message in messages[1:]]
                messages = rounds.send(replies)
        except StopIteration as end:
            outcome = end.value
            return outcome._replace(sent_bytes=outcome.sent_bytes + extra)

    def _answer(self, message: Sum | Gather, check: Check | None = None) -> tf.Tensor:
        if isinstance(message, Sum):
            return self(True, message.values, tf.zeros([0], tf.int32), check)[0]
        return self(False, tf.zeros([0]), message.words, check)[1]


def _num_bytes(tensor: tf.Tensor, otherwise: int | None) -> int | None:
    """Return the size of a tensor, if it is known while tracing."""
    entries = tensor.shape.num_elements()
    return otherwise if entries is None else entries * tensor.dtype.size
