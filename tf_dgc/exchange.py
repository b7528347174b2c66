"""Exchange: the collectives of a step, over the cross-device hook."""

from typing import Any

import tensorflow as tf

from tf_dgc import distribute
from tf_dgc.choice import Choice
from tf_dgc.compressors.base import Gather, Sum
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
        self, dense: Choice, vector: tf.Tensor, words: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Do one of two collectives; call it in replica context.

        Args:
            dense: whether to sum `vector` (else `words` is gathered), equal on all
                workers; a bool, or a scalar bool tensor decided at run time.
            vector: float `[n]`.
            words: int32 `[w]`, w equal on all workers.

        Returns:
            The sum `[n]`, and the buffers, int32 `[num_workers, w]`. The one that was
            not asked for is empty.
        """
        hook = self._hook
        if hook is None:
            return vector, words[tf.newaxis]

        def exchange(_: Any, *args: Any) -> Any:
            return hook.exchange(*args)

        context = tf.distribute.get_replica_context()
        total, buffers = context.merge_call(exchange, args=(dense, vector, words))
        return total, tf.reshape(buffers, [self.num_workers, -1])

    def run(self, rounds: Rounds) -> Outcome:
        """Do the collectives that all rounds of a step ask for."""
        try:
            messages = next(rounds)
            while True:
                replies = [self._answer(message) for message in messages]
                messages = rounds.send(replies)
        except StopIteration as end:
            return end.value

    def _answer(self, message: Sum | Gather) -> tf.Tensor:
        if isinstance(message, Sum):
            return self(True, message.values, tf.zeros([0], tf.int32))[0]
        return self(False, tf.zeros([0]), message.words)[1]
