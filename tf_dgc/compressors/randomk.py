"""Random-k: the same random entries on all workers, summed on the way."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import schedules
from tf_dgc.collectives.requests import Exchange, Result, Sum
from tf_dgc.compressors.base import Compressor, Draw
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.topk import num_sent


@keras.saving.register_keras_serializable(package="tf_dgc")
class RandomK(Compressor):
    """Sends k entries chosen uniformly at random, the same on all workers.

    Stich et al., definition 2.1 (`rand_k`). All workers draw the same positions from
    the shared seed, so none are sent, and k values are summed by one all-reduce: the
    cost does not grow with the number of workers. With `unbiased=True` values are
    multiplied by `n / k`, so the expectation is the input (Wangni et al., NeurIPS 2018,
    with equal probabilities); the variance is then `n/k - 1` times the square of the
    input, and error feedback, which it would make diverge, is refused.

    Args:
        sparsity: share of entries not sent, in [0, 1).
        unbiased: whether to multiply by `n / k`.
    """

    name = "random_k"
    kind = "sparsification"
    reference = "Stich et al., Sparsified SGD with memory, NeurIPS 2018"
    aggregation = "sum"

    def __init__(self, sparsity: float = 0.99, unbiased: bool = False):
        self.sparsity = schedules.check_sparsity(sparsity)
        self.unbiased = bool(unbiased)
        self.error_feedback = "forbidden" if self.unbiased else "default"

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of k values."""
        return dtype.size * num_sent(math.prod(shape), self.sparsity)

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], draw: Draw
    ) -> Exchange:
        """Draw positions, and sum what is there."""
        del state
        values = tf.reshape(values, [-1])
        size = values.shape[0]
        k = num_sent(size, self.sparsity)
        order = tf.random.stateless_uniform(
            [size], draw.shared(), minval=None, maxval=None, dtype=tf.int32
        )
        positions = tf.math.top_k(order, k, sorted=False).indices
        where = positions[:, tf.newaxis]
        sent = tf.gather_nd(values, where)
        if self.unbiased:
            sent *= size / k
        total = yield Sum(sent)
        return Result(
            tf.scatter_nd(where, total, [size]),
            tf.scatter_nd(where, sent, [size]),
            entries=k,
            chosen=sparse.marks(positions, size),
        )

    def error_bound(self, size: int) -> float:
        """Return `1 - k/n` (lemma A.1), or `n/k - 1` if unbiased."""
        share = num_sent(size, self.sparsity) / size
        return 1 / share - 1 if self.unbiased else 1 - share

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"sparsity": self.sparsity, "unbiased": self.unbiased}
