"""Random-k: the same random entries on all workers, summed by an all-reduce."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import arguments
from tf_dgc.collectives.requests import Aggregation, AllReduce, Result, SparseEntries
from tf_dgc.compressors.base import NativeMethod, Sparsifier
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent, tie_offset


@keras.saving.register_keras_serializable(package="tf_dgc")
class RandomK(Sparsifier):
    """Sends k random entries, the same on all workers.

    Stich et al., definition 2.1 (`rand_k`). All workers draw the same positions from
    the shared seed, so positions are not sent, and k values are summed by one
    all-reduce: the cost does not grow with the number of workers. With `unbiased=True`
    values are multiplied by `n / k`, so that the expected value is the input (Wangni et
    al., NeurIPS 2018, with equal probabilities). The variance is then `n/k - 1` times
    the square of the input; error feedback would diverge and is not allowed.

    The paper draws any k of n entries. Here the tensor is cut cyclically, from a random
    offset, into k stretches of equal length, and one entry of each is drawn: that takes
    k random numbers instead of n. An entry is still sent with probability `k/n`, which
    alone determines expected value and variance; but k adjacent entries are never drawn
    together.

    Args:
        sparsity: share of entries not sent, in [0, 1).
        unbiased: whether to multiply by `n / k`.
    """

    name = "random_k"
    reference = "Stich et al., Sparsified SGD with memory, NeurIPS 2018"
    aggregation = "sum"

    def __init__(self, sparsity: float = 0.99, unbiased: bool = False):
        self.sparsity = arguments.check_sparsity(sparsity)
        self.unbiased = bool(unbiased)
        self.error_feedback = "forbidden" if self.unbiased else "default"

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of k values."""
        return dtype.size * num_sent(math.prod(shape), self.sparsity)

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Draw positions, and sum the values at these."""
        del state
        values = tf.reshape(values, [-1])
        size = values.shape[0]
        k = num_sent(size, self.sparsity)
        positions = _draw(size, k, keys)
        sent = tf.gather(values, positions)
        if self.unbiased:
            sent *= size / k
        total = yield AllReduce(sent)
        return Result(
            SparseEntries(positions, total, size),
            SparseEntries(positions, sent, size),
            entries=k,
        )

    def native(self, shape: tuple[int, ...]) -> NativeMethod:
        """Return the native method, with k and the factor of values."""
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        factor = size / k if self.unbiased else 1.0
        parameters = [*NativeMethod.in_halves(k), factor]
        return NativeMethod(self.name, parameters, (), tf.float32, k)

    def error_bound(self, size: int) -> float:
        """Return `1 - k/n` (lemma A.1), or `n/k - 1` if unbiased."""
        share = num_sent(size, self.sparsity) / size
        return 1 / share - 1 if self.unbiased else 1 - share

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"sparsity": self.sparsity, "unbiased": self.unbiased}


def _draw(size: int, k: int, keys: RandomKeys) -> tf.Tensor:
    """Return a position in each stretch, int32 `[k]`, cyclically ascending."""
    bounds = tf.range(k + 1, dtype=tf.int64) * size // k
    lengths = bounds[1:] - bounds[:-1]
    words = tf.random.stateless_uniform([k], keys.shared(), None, None, tf.uint32)
    positions = bounds[:-1] + tf.math.floormod(tf.cast(words, tf.int64), lengths)
    offset = tf.cast(tie_offset(size, keys), tf.int64)
    return tf.cast(tf.math.floormod(positions + offset, size), tf.int32)
