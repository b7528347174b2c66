"""ScaleCom: the largest entries of one worker, whose values all workers sum."""

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
from tf_dgc.compressors.base import Sparsifier
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.largest import top_k
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent, tie_offset


@keras.saving.register_keras_serializable(package="tf_dgc")
class ScaleCom(Sparsifier):
    """Sums all workers' values at the positions of one worker's k largest entries.

    Chen et al., section 2 (CLT-k, "cyclic local top-k"): in step t worker `t mod N`
    leads. All workers send their values at the positions of the leader's k entries of
    largest magnitude. These are summed by an all-reduce, so the cost does not grow with
    the number of workers. The method works well if residuals are similar on all
    workers; the paper shows that they become so.

    It has two rounds: a sum of the positions (Elias-Fano), to which only the leader
    contributes, and a sum of k values.

    Args:
        sparsity: share of entries not sent, in [0, 1).
        low_pass: share of a step's error that enters the residual, the paper's beta, in
            (0, 1]. Below 1 (0.1 in the paper, for large batches and learning rates) the
            residual follows slowly, and the rest is lost.
    """

    name = "scale_com"
    reference = "Chen et al., ScaleCom, NeurIPS 2020"
    aggregation = "sum"
    reads_residual = True

    def __init__(self, sparsity: float = 0.999, low_pass: float = 1.0):
        self.sparsity = check_sparsity(sparsity)
        self.low_pass = check_number("low_pass", low_pass, "(0, 1]", "; 1 keeps all")
        self.additive = self.low_pass == 1

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of k positions and k values."""
        size = math.prod(shape)
        k = num_sent(size, self.sparsity)
        return 4 * sparse.position_words(size, k) + dtype.size * k

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Receive the leader's positions, and sum the values at these."""
        values = tf.reshape(values, [-1])
        size = values.shape[0]
        k = num_sent(size, self.sparsity)
        words = yield AllReduce(_leader_words(values, k, keys))
        decoded, checks = elias_fano.decode(words[tf.newaxis], size, k)
        positions = require(checks, decoded)[0]
        mine = tf.gather(values, positions)
        total = yield AllReduce(mine)
        total_entries = SparseEntries(positions, total, size)
        entries = SparseEntries(positions, mine, size)
        if self.low_pass == 1:
            return Result(total_entries, entries, entries=k)
        gradient = values - tf.reshape(state["residual"], [-1])
        sent = to_dense_tensor(entries)
        sent += (1 - self.low_pass) * (gradient - sent)
        return Result(total_entries, sent, entries=k, chosen=position_mask(entries))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"sparsity": self.sparsity, "low_pass": self.low_pass}


def _leader_words(values: tf.Tensor, k: int, keys: RandomKeys) -> tf.Tensor:
    """Return the words of this worker's positions, int32; zeros unless it leads."""
    size = values.shape[0]
    leader = tf.math.floormod(tf.cast(keys.step, tf.int64), keys.num_workers)

    def encode() -> tf.Tensor:
        positions, _ = top_k(values, k, tie_offset(size, keys))
        return elias_fano.encode(positions, size, k)

    length = sparse.position_words(size, k)
    is_leader = tf.equal(leader, tf.cast(keys.worker, tf.int64))
    words = tf.cond(is_leader, encode, lambda: tf.zeros([length], tf.int32))
    return tf.ensure_shape(words, [length])
