"""ScaleCom: one worker's choice of entries, of which all sum their values."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number, check_sparsity
from tf_dgc.codecs import elias_fano
from tf_dgc.codecs.checks import require
from tf_dgc.collectives.requests import (
    Aggregation,
    AllReduce,
    Result,
    SparseEntries,
    position_mask,
    to_dense_tensor,
)
from tf_dgc.compressors.base import Compressor
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.largest import top_k
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent, tie_offset


@keras.saving.register_keras_serializable(package="tf_dgc")
class ScaleCom(Compressor):
    """Sends what all workers have where one of them, in turn, has its k largest.

    Chen et al., section 2 (CLT-k, "cyclic local top-k"): in step t worker `t mod N`
    leads. Everyone sends its values at the positions of the leader's k entries of
    largest magnitude, and they are summed on the way: what a worker sends and receives
    does not grow with the number of workers. It works as well as workers' residuals
    are alike; that they are, more and more, is what the paper shows.

    On the wire: a sum of the positions (Elias-Fano), to which only the leader
    contributes, and a sum of k values. Two rounds.

    Args:
        sparsity: share of entries not sent, in [0, 1).
        low_pass: share of a step's error that enters the residual, the paper's beta, in
            (0, 1]. Below 1 (0.1 in the paper, for large batches and learning rates) the
            residual follows slowly, and what does not enter it is lost.
    """

    name = "scale_com"
    kind = "sparsification"
    reference = "Chen et al., ScaleCom, NeurIPS 2020"
    aggregation = "sum"
    reads_residual = True
    needs_others = True

    def __init__(self, sparsity: float = 0.999, low_pass: float = 1.0):
        self.sparsity = check_sparsity(sparsity)
        self.low_pass = check_number("low_pass", low_pass, "(0, 1]", "; 1 keeps all")
        self.additive = self.conserves = self.low_pass == 1

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of k positions and k values."""
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        return 4 * sparse.position_words(size, k) + dtype.size * k

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Hear from the leader which entries; sum them."""
        values = tf.reshape(values, [-1])
        size = values.shape[0]
        k = num_sent(size, self.sparsity)
        words = yield AllReduce(_lead(values, k, keys))
        decoded, checks = elias_fano.decode(words[tf.newaxis], size, k)
        positions = require(checks, decoded)[0]
        mine = tf.gather(values, positions)
        total = SparseEntries(positions, (yield AllReduce(mine)), size)
        sent = SparseEntries(positions, mine, size)
        if self.low_pass == 1:
            return Result(total, sent, entries=k)
        gradient = values - tf.reshape(state["residual"], [-1])
        sent, chosen = to_dense_tensor(sent), position_mask(sent)
        sent += (1 - self.low_pass) * (gradient - sent)
        return Result(total, sent, entries=k, chosen=chosen)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"sparsity": self.sparsity, "low_pass": self.low_pass}


def _lead(values: tf.Tensor, k: int, keys: RandomKeys) -> tf.Tensor:
    """Return the words of the leader's positions, int32; zeros of all others."""
    size = values.shape[0]
    leader = tf.math.floormod(tf.cast(keys.step, tf.int64), keys.num_workers)

    def mine() -> tf.Tensor:
        positions, _ = top_k(values, k, tie_offset(size, keys))
        return elias_fano.encode(positions, size, k)

    length = sparse.position_words(size, k)
    leads = tf.equal(leader, tf.cast(keys.worker, tf.int64))
    words = tf.cond(leads, mine, lambda: tf.zeros([length], tf.int32))
    return tf.ensure_shape(words, [length])
