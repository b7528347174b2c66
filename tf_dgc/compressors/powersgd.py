"""PowerSGD: one step of a power iteration, in two rounds of all-reduce."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_whole
from tf_dgc.collectives.requests import Aggregation, AllReduce, Result
from tf_dgc.compressors.base import NativeMethod, RandomKeys, StateSpec
from tf_dgc.compressors.common.low_rank import as_matrix
from tf_dgc.compressors.common.one_round import (
    MethodStates,
    RoundsResult,
    TwoRounds,
    send_whole,
)


@keras.saving.register_keras_serializable(package="tf_dgc")
class PowerSGD(TwoRounds):
    """Sends two thin factors of every gradient matrix.

    Vogels et al., algorithm 1: `P = M Q`, summed over workers and orthogonalized;
    `Q = M' P`, summed; the sum is approximated by `P Q'`. Q is the start of the next
    step (warm start). Everything is linear in M, so factors are summed by all-reduce
    and the cost does not grow with the number of workers. What this worker contributed
    is `P (M' P)'`, a projection of its own matrix.

    A row without a gradient on any worker does not move: where P has no entries, its
    basis gets none.

    A tensor is a matrix whose columns are its last axis: the output features of Keras's
    dense and convolutional kernels. One whose factors are no smaller than itself is
    sent whole.

    Args:
        rank: number of columns of the factors; 1 to 4 in the paper.
        warm_start: whether to start from the Q of the last step; else from one drawn at
            random, the same on all workers, which takes no state and approximates less
            well.
    """

    name = "power_sgd"
    kind = "low rank"
    reference = "Vogels et al., PowerSGD, NeurIPS 2019"
    aggregation = "sum"

    def __init__(self, rank: int = 4, warm_start: bool = True):
        self.rank = check_whole("rank", rank)
        self.warm_start = bool(warm_start)

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return Q, `[columns, rank]`, normal at first, unless it is not needed."""
        rows, columns = as_matrix(shape)
        if self._sends_whole(rows, columns) or not self.warm_start:
            return {}
        factor = (columns, self.rank)
        return {"q": StateSpec(factor, False, lambda rng: rng.normal(size=factor))}

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return those of both factors, or of the tensor if that is less."""
        rows, columns = as_matrix(shape)
        return dtype.size * min(rows * columns, self.rank * (rows + columns))

    def exchange(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Do one step of the power iteration."""
        rows, columns = as_matrix(tuple(values.shape))
        if self._sends_whole(rows, columns):
            return (yield from send_whole(values, self.aggregation))
        matrix = tf.reshape(values, [rows, columns])
        start = state["q"] if self.warm_start else self._drawn(columns, values, keys)
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

    def told_first(self, states: MethodStates) -> list[tf.Tensor]:
        """Return the start of each tensor's iteration."""
        return [state["q"].local() for state in states]

    def settle(
        self, ended: RoundsResult, states: MethodStates
    ) -> list[dict[str, tf.Tensor]]:
        """Return the start of the next one."""
        return [
            {"q": _scaled(tf.reshape(q, state["q"].shape))}
            for q, state in zip(ended.sums, states, strict=True)
        ]

    def error_bound(self, size: int) -> float:
        """Return 1: a projection never adds."""
        del size
        return 1.0

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"rank": self.rank, "warm_start": self.warm_start}

    def _drawn(self, columns: int, like: tf.Tensor, keys: RandomKeys) -> tf.Tensor:
        shape = [columns, self.rank]
        return tf.random.stateless_normal(shape, keys.shared(), dtype=like.dtype)

    def _sends_whole(self, rows: int, columns: int) -> bool:
        return self.rank * (rows + columns) >= rows * columns


def _orthonormal(p: tf.Tensor) -> tf.Tensor:
    """Return a basis whose first columns are orthonormal, and span those of `p`.

    Householder's: a column that depends on the others, or is zero, is replaced by
    one that does not, so Q can leave zero again. Such a column may have entries in rows
    where p has none, which would move rows without a gradient: there it becomes 0. If
    all of p is zero, the basis is that of the first coordinates, which moves none.
    """
    has_entries = tf.reduce_any(p != 0, axis=1, keepdims=True)
    keeps = has_entries | ~tf.reduce_any(has_entries)
    basis = tf.linalg.qr(_scaled(p)).q
    return tf.where(keeps, basis, tf.zeros_like(basis))


def _scaled(factor: tf.Tensor) -> tf.Tensor:
    """Return the factor with largest entry 1: only its direction counts."""
    return tf.math.divide_no_nan(factor, tf.reduce_max(tf.abs(factor)))
