"""A communicator that answers at once, as if all workers had sent the same."""

import tensorflow as tf

from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import AllGather, DenseOrSparse, DenseOrSparseReply


class CopyingCommunicator(Communicator):
    """Gathers copies of this worker's words; a sum over workers is its own value.

    Copying is not the method's work, so its time is measured. The values of all
    requests are computed, even if the reply is not used.

    Args:
        num_workers: number of copies.

    Attributes:
        requests: number of requests answered while tracing.
    """

    def __init__(self, num_workers):
        super().__init__(tf.distribute.get_strategy())
        self.num_workers = num_workers
        self.requests = 0
        self._seconds = []
        self._words = []

    def answer(self, request, check=None):
        """Return the reply once all values of the request are computed."""
        self.requests += 1
        if isinstance(request, AllGather):
            return self._gather(request.words)
        if isinstance(request, DenseOrSparse):
            return DenseOrSparseReply(
                _with_time(request.vector)[0], self._gather(request.words)
            )
        return _with_time(request.values)[0]

    def costs(self):
        """Return the seconds of copying and the bytes gathered, as tensors."""
        zero = tf.constant(0, tf.float64)
        gathered = 4 * self.num_workers * tf.add_n([tf.constant(0), *self._words])
        return tf.add_n([zero, *self._seconds]), gathered

    def _gather(self, words):
        words, begin = _with_time(words)
        copies, end = _with_time(tf.tile(words[tf.newaxis], [self.num_workers, 1]))
        copies.set_shape([self.num_workers, *words.shape])
        self._seconds.append(end - begin)
        self._words.append(tf.size(words))
        return copies


def _with_time(tensor):
    """Return a tensor and the time at which it is computed; uses wait for that time."""
    with tf.control_dependencies([tensor]):
        now = tf.timestamp()
    with tf.control_dependencies([now]):
        return tf.identity(tensor), now
