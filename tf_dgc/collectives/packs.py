"""Packs: many tensors' requests as one collective, and its reply as many."""

import tensorflow as tf

from tf_dgc.codecs import header
from tf_dgc.collectives.requests import Gather, Sum


class SumPack:
    """Everything of one dtype that is to be summed, behind the non-finite flag.

    Args:
        requests: values to be summed, of any shape, by the part's number.
        finite: scalar bool, whether this worker's gradient was finite.

    Attributes:
        message: request of the collective, a vector behind the flag.
    """

    def __init__(self, requests: dict[int, tf.Tensor], finite: tf.Tensor):
        self._requests = requests
        dtype = next(iter(requests.values())).dtype
        flag = tf.cast(tf.logical_not(finite), dtype)[tf.newaxis]
        flat = [tf.reshape(values, [-1]) for values in requests.values()]
        self.message = Sum(tf.concat([flag, *flat], axis=0))

    def unpack(self, total: tf.Tensor) -> tuple[dict[int, tf.Tensor], tf.Tensor]:
        """Return the reply to each request, and the number of non-finite gradients."""
        sizes = [num_entries(values) for values in self._requests.values()]
        flag, *parts = tf.split(total, [1, *sizes])
        replies = {
            i: tf.reshape(
                part, tf.shape(values) if None in values.shape else values.shape
            )
            for (i, values), part in zip(self._requests.items(), parts, strict=True)
        }
        return replies, tf.cast(flag[0], tf.int32)


class GatherPack:
    """All words that are to be gathered, behind a header.

    Args:
        requests: words to be gathered, int32 vectors, by the part's number.
        agreed: fingerprint of what must be equal on all workers.
        finite: scalar bool, whether this worker's gradient was finite.

    Attributes:
        message: request of the collective, int32 words behind a header.
    """

    def __init__(self, requests: dict[int, tf.Tensor], agreed: int, finite: tf.Tensor):
        self._requests = requests
        self._agreed = agreed
        sizes = [num_entries(words) for words in requests.values()]
        self._length = header.NUM_WORDS + sum(sizes)
        body = list(requests.values())
        self.message = Gather(header.seal(agreed, self._length, body, finite))

    def unpack(self, buffers: tf.Tensor) -> tuple[dict[int, tf.Tensor], tf.Tensor]:
        """Return the reply to each request, and the number of non-finite gradients."""
        words, nonfinite = header.unseal(buffers, self._agreed, self._length)
        sizes = [num_entries(words) for words in self._requests.values()]
        parts = tf.split(words, sizes, axis=1)
        return dict(zip(self._requests, parts, strict=True)), nonfinite


def num_entries(values: tf.Tensor) -> int | tf.Tensor:
    """Return an int if it is known while tracing, else a scalar int64 tensor."""
    known = values.shape.num_elements()
    return tf.size(values, tf.int64) if known is None else known


def num_bytes(values: tf.Tensor) -> int | tf.Tensor:
    """Return an int if it is known while tracing, else a scalar int64 tensor."""
    return num_entries(values) * values.dtype.size
