"""PowerSGD: one step of a power iteration, in two rounds of all-reduce."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.collectives.requests import Aggregation, AllReduce, Result
from tf_dgc.compressors.base import LowRank, NativeMethod, StateSpec
from tf_dgc.compressors.common.low_rank import as_matrix
from tf_dgc.compressors.common.one_round import (
    MethodStates,
    RoundsResult,
    TwoRounds,
    send_whole,
)
from tf_dgc.compressors.random_keys import RandomKeys


@keras.saving.register_keras_serializable(package="tf_dgc")
class PowerSGD(TwoRounds, LowRank):
    """Sends two thin factors of every gradient matrix.

    Vogels et al., algorithm 1:

    1. `P = M Q`, summed over workers and orthogonalized.
    2. `Q = M' P`, summed over workers.
    3. The sum of all M is approximated by `P Q'`, of which `P (M' P)'`, a projection of
       its own matrix, is this worker's contribution.

    The next step starts from Q (warm start). All of this is linear in M, so factors are
    summed by all-reduce and the cost does not grow with the number of workers.

    A row without a gradient on any worker does not change: where P has no entries, its
    basis has none.

    A tensor is a matrix whose columns are its last axis, the output features of Keras's
    dense and convolutional kernels. It is sent whole if its factors are not smaller.

    Args:
        rank: number of columns of the factors; 1 to 4 in the paper.
        warm_start: whether to start from the Q of the last step; else from a random Q,
            the same on all workers, which needs no state and approximates less well.
    """

    name = "power_sgd"
    reference = "Vogels et al., PowerSGD, NeurIPS 2019"
    aggregation = "sum"

    def __init__(self, rank: int = 4, warm_start: bool = True):
        self.rank = check_whole("rank", rank)
        self.warm_start = bool(warm_start)

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return Q, `[columns, rank]`, initially normal, if it is needed."""
        rows, columns = as_matrix(shape)
        if self._sends_whole(rows, columns) or not self.warm_start:
            return {}
        factor = (columns, self.rank)
        return {"q": StateSpec(factor, False, lambda rng: rng.normal(size=factor))}

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of both factors, or of the tensor if it is smaller."""
        rows, columns = as_matrix(shape)
        return dtype.size * min(rows * columns, self.rank * (rows + columns))

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Compute and sum both factors."""
        rows, columns = as_matrix(tuple(values.shape))
        if self._sends_whole(rows, columns):
            return (yield from send_whole(values, self.aggregation))
        matrix = tf.reshape(values, [rows, columns])
        if self.warm_start:
            start = state["q"]
        else:
            start = tf.random.stateless_normal(
                [columns, self.rank], keys.shared(), dtype=values.dtype
            )
        p_sum = yield AllReduce(tf.linalg.matmul(matrix, start))
        basis = _orthonormal(p_sum)
        q = tf.linalg.matmul(matrix, basis, transpose_a=True)
        q_sum = yield AllReduce(q)
        return Result(
            tf.linalg.matmul(basis, q_sum, transpose_b=True),
            tf.linalg.matmul(basis, q, transpose_b=True),
            {"q": _scaled(q_sum)} if self.warm_start else None,
        )

    def native(self, shape: tuple[int, ...]) -> NativeMethod | None:
        """Return the native method; None without a warm start."""
        rows, columns = as_matrix(shape)
        if self._sends_whole(rows, columns):
            return NativeMethod("whole", [math.inf], summed_as=tf.float32)
        if not self.warm_start:
            return None
        return NativeMethod(
            self.name,
            [self.rank],
            summed_as=tf.float32,
            num_summed=columns * self.rank,
            first=f"{self.name}, left",
            first_summed=rows * self.rank,
            num_notes=rows * self.rank,
            all_workers_native=True,
        )

    def first_parameters(self, states: MethodStates) -> list[tf.Tensor]:
        """Return the Q with which each tensor starts."""
        return [state["q"].local() for state in states]

    def updated_states(
        self, rounds: RoundsResult, states: MethodStates
    ) -> list[dict[str, tf.Tensor]]:
        """Return the Q with which each tensor's next step starts."""
        return [
            {"q": _scaled(tf.reshape(q, state["q"].shape))}
            for q, state in zip(rounds.sums, states, strict=True)
        ]

    def error_bound(self, size: int) -> float:
        """Return 1, as a projection never increases the norm."""
        del size
        return 1.0

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"rank": self.rank, "warm_start": self.warm_start}

    def _sends_whole(self, rows: int, columns: int) -> bool:
        return self.rank * (rows + columns) >= rows * columns


def _orthonormal(p: tf.Tensor) -> tf.Tensor:
    """Return a basis whose first columns are orthonormal and span those of `p`.

    The QR decomposition replaces columns that depend on others, or are zero, by
    independent ones, so that Q can leave zero again. These may have entries in rows
    where `p` has none; they are set to 0, so that rows without a gradient do not
    change. If all of `p` is zero, the basis is that of the first coordinates, which
    changes only rows with a gradient.
    """
    has_entries = tf.reduce_any(p != 0, axis=1, keepdims=True)
    keeps = has_entries | ~tf.reduce_any(has_entries)
    basis = tf.linalg.qr(_scaled(p)).q
    return tf.where(keeps, basis, tf.zeros_like(basis))


def _scaled(factor: tf.Tensor) -> tf.Tensor:
    """Scale a factor, of which only the direction matters, to largest entry 1."""
    return tf.math.divide_no_nan(factor, tf.reduce_max(tf.abs(factor)))
