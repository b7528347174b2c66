"""Sparse ternary compression: the k largest entries, as signs of one magnitude."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc import arguments
from tf_dgc.collectives.requests import Aggregation, to_dense_tensor
from tf_dgc.compressors.base import NativeMethod, Sparsifier, StateSpec
from tf_dgc.compressors.common import sparse
from tf_dgc.compressors.common.largest import top_k
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent, tie_offset


@keras.saving.register_keras_serializable(package="tf_dgc")
class STC(Sparsifier):
    """Sends the k entries of largest magnitude as `mu` or `-mu`, their mean magnitude.

    Sattler et al., algorithm 1: `k = max(n p, 1)`, `mu` is the mean magnitude of the
    k, and the tensor becomes `mu * sign` there and 0 elsewhere. The rest stays in the
    residual (algorithm 2). A payload has one float32 magnitude, 1 bit per sign, and
    positions of about `2 + log2(n / k)` bits each by Elias-Fano: 10.6 at the default
    sparsity. The paper's Golomb code takes 10.1 on average, by the formula in `SBC`.
    The method is `TopK` with `value_dtype="sign"`, with the paper's defaults and
    `downstream`.

    If fewer than k entries are nonzero, zeros are sent as `mu`, too, and the residual
    compensates for it in later steps: weights without a gradient fluctuate around their
    values.

    The paper also compresses the server's reply: the sum plus the server's own residual
    goes through algorithm 1 again. Here every worker has all payloads, so that saves
    nothing. `downstream=True` reproduces the paper's steps, in the same way on all
    workers: the update is ternary, and its error stays in the shared state
    `server_residual`.

    Args:
        sparsity: share of entries not sent, in [0, 1); the paper's experiments use
            `p = 1/400`.
        downstream: whether to compress the sum once more.
    """

    name = "stc"
    reference = "Sattler et al., Robust federated learning (STC), TNNLS 2020"

    def __init__(self, sparsity: float = 0.9975, downstream: bool = False):
        self.sparsity = arguments.check_sparsity(sparsity)
        self.downstream = bool(downstream)
        self.additive = not self.downstream

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return the server's residual with `downstream`."""
        if not self.downstream:
            return {}
        return {"server_residual": StateSpec(shape, per_worker=False)}

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of k positions and signs, and of a float32 magnitude."""
        del dtype
        size = math.prod(shape)
        return 4 * sparse.num_words(size, num_sent(size, self.sparsity), "sign")

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Select and gather; with `downstream` compress the sum."""
        flat = tf.reshape(values, [-1])
        k = num_sent(flat.shape[0], self.sparsity)
        positions = _largest(flat, k, keys)
        result = yield from sparse.send_entries(flat, positions, k, "sign")
        if not self.downstream:
            return result
        residual = tf.reshape(state["server_residual"], [-1])
        total = residual + to_dense_tensor(result.sum)
        update = _ternary(total, _largest(total, k, keys))
        residual = tf.reshape(total - update, values.shape)
        return result._replace(sum=update, state={"server_residual": residual})

    def native(self, shape: tuple[int, ...]) -> NativeMethod | None:
        """Return the native method; None with `downstream`."""
        if self.downstream:
            return None
        k = num_sent(math.prod(shape), self.sparsity)
        return NativeMethod("top_k", sparse.native_parameters(k, "sign"))

    def error_bound(self, size: int) -> float:
        """Return `1 - 1/n`: the squared error is `|v|_2^2 - |v_k|_1^2 / k`."""
        return 1 - 1 / size

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"sparsity": self.sparsity, "downstream": self.downstream}


def _largest(values: tf.Tensor, k: int, keys: RandomKeys) -> tf.Tensor:
    offset = tie_offset(values.shape[0], keys)
    return top_k(values, k, offset)[0]


def _ternary(values: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Return the mean magnitude with the entries' signs at positions, 0 elsewhere."""
    selected = tf.gather(values, positions)
    mean = tf.reduce_mean(tf.cast(tf.abs(selected), tf.float64))
    mean = tf.cast(mean, values.dtype)
    signed = tf.where(selected < 0, -mean, mean)
    return tf.scatter_nd(positions[:, tf.newaxis], signed, values.shape)
