"""A communicator that answers at once, as if other workers had sent the same."""

import tensorflow as tf

from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import AllGather, DenseOrSparse, DenseOrSparseReply


class CopyingCommunicator(Communicator):
    """Gathers copies of this worker's words; a sum over workers is what it has itself.

    What it does is no work of the method, so it says how long it took. All that was
    asked for is computed, even if nobody uses the reply.

    Args:
        num_workers: copies.

    Attributes:
        requests: that were answered while tracing.
    """

    def __init__(self, num_workers):
        super().__init__(tf.distribute.get_strategy())
        self.num_workers = num_workers
        self.requests = 0
        self._seconds = []
        self._words = []

    def answer(self, request, check=None):
        """Return the reply, after all of the request is there."""
        self.requests += 1
        if isinstance(request, AllGather):
            return self._gather(request.words)
        if isinstance(request, DenseOrSparse):
            return DenseOrSparseReply(
                _after_all(request.vector)[0], self._gather(request.words)
            )
        return _after_all(request.values)[0]

    def spent(self):
        """Return the seconds that copying took, and the bytes gathered, as tensors."""
        zero = tf.constant(0, tf.float64)
        gathered = 4 * self.num_workers * tf.add_n([tf.constant(0), *self._words])
        return tf.add_n([zero, *self._seconds]), gathered

    def _gather(self, words):
        words, begin = _after_all(words)
        copies, end = _after_all(tf.tile(words[tf.newaxis], [self.num_workers, 1]))
        copies.set_shape([self.num_workers, *words.shape])
        self._seconds.append(end - begin)
        self._words.append(tf.size(words))
        return copies


def _after_all(tensor):
    """Return a tensor, and the time when it is there, before which nobody gets it."""
    with tf.control_dependencies([tensor]):
        now = tf.timestamp()
    with tf.control_dependencies([now]):
        return tf.identity(tensor), now
