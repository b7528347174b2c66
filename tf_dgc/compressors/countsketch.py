"""Count Sketch: a table that an all-reduce sums, and that shows the large entries."""

import math
from typing import Any

import keras
import tensorflow as tf

from tf_dgc.arguments import check_number, check_sparsity, check_whole, show
from tf_dgc.collectives.requests import Aggregation, AllReduce, Result, SparseEntries
from tf_dgc.compressors.base import NativeMethod, Sparsifier, StateSpec
from tf_dgc.compressors.common import capacity as slots
from tf_dgc.compressors.common.largest import top_k
from tf_dgc.compressors.common.one_round import send_whole
from tf_dgc.compressors.common.sketch import Sketch
from tf_dgc.compressors.random_keys import RandomKeys
from tf_dgc.compressors.topk import num_sent, tie_offset


@keras.saving.register_keras_serializable(package="tf_dgc")
class CountSketch(Sparsifier):
    """Finds the k largest entries of the sum in a sketch that an all-reduce sums.

    A Count Sketch has `rows` rows of `columns * n` cells. Each row adds every entry,
    with a sign of +-1, to one cell; cells and signs are random and the same on all
    workers. Sketches are linear: the sum of the workers' sketches is the sketch of the
    sum. The median over rows of an entry's cells, with its signs, is an estimate of the
    entry, which is good for the largest entries.

    With the default `second_round=True` this is sketched SGD (Ivkin et al., NeurIPS
    2019, algorithm 1): all workers find the same k positions of largest estimate, and a
    second all-reduce sums the exact entries at these. The rest stays in each worker's
    residual. Cells and signs are drawn anew in each step, so that no entry hides
    another for long. The paper fetches a multiple of k entries and applies the best k;
    here all fetched entries are applied.

    `second_round=False` is FetchSGD (Rothchild et al., algorithm 1): the k estimates
    are the update. As they are noisy, a worker does not know its residual; instead,
    momentum and error are sketches, the same on all workers: `S_u = rho S_u + S`,
    `S_e += S_u`, `update = top-k of S_e's estimates`. The cells of the update's entries
    become 0 in S_e and, by momentum factor masking, in S_u. The authors' code does the
    same; line 14 of their algorithm, `S_e -= sketch(update)`, diverges unless there are
    far more cells than k. The learning rate is applied to the update, not within S_e,
    and every tensor has its own sketch. As in the paper, choose about 10 times as many
    columns as k. Estimates contain parts of other entries: weights without a gradient
    may change.

    A tensor is sent whole if its sketch is not smaller.

    Args:
        sparsity: share of entries not sent, in [0, 1).
        rows: number of rows, odd, so that there is a median; 5 in the papers.
        columns: cells of a row, as a share of the entries, in (0, 1].
        second_round: whether to fetch exact entries.
        momentum: coefficient rho, in [0, 1), only without a second round; the inner
            optimizer then should have none.
    """

    name = "count_sketch"
    reference = "Rothchild et al., FetchSGD, ICML 2020"
    aggregation = "sum"

    def __init__(
        self,
        sparsity: float = 0.99,
        rows: int = 5,
        columns: float = 0.02,
        second_round: bool = True,
        momentum: float = 0.0,
    ):
        self.rows = check_whole("rows", rows)
        self.momentum = check_number("momentum", momentum, "[0, 1)")
        if self.rows % 2 == 0:
            raise ValueError(
                "`rows` must be an odd whole number, 1 or more. "
                f"Received: rows={show(rows)}"
            )
        if self.momentum and second_round:
            raise ValueError(
                "`momentum` must be 0 with `second_round=True`, where it belongs to "
                "the inner optimizer. "
                f"Received: momentum={show(momentum)}, "
                f"second_round={show(second_round)}"
            )
        self.sparsity = check_sparsity(sparsity)
        self.columns = slots.check_share("columns", columns)
        self.second_round = bool(second_round)
        self.momentum = float(momentum)
        self.additive = self.second_round
        self.error_feedback = "default" if self.second_round else "forbidden"

    def state(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Return the sketches S_e and S_u of FetchSGD."""
        size = math.prod(shape)
        if self.second_round or self._sends_whole(size):
            return {}
        table = StateSpec((self.rows, self._cells(size)), per_worker=False)
        names = ["error", "momentum"] if self.momentum else ["error"]
        return dict.fromkeys(names, table)

    def bytes(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the bytes of the sketch and of k entries, or of the whole tensor."""
        size = math.prod(shape)
        return dtype.size * (size if self._sends_whole(size) else self._numbers(size))

    def aggregate(
        self, values: tf.Tensor, state: dict[str, tf.Tensor], keys: RandomKeys
    ) -> Aggregation:
        """Sketch, sum, and find the largest."""
        size = values.shape.num_elements()
        if self._sends_whole(size):
            return (yield from send_whole(values, self.aggregation))
        values = tf.reshape(values, [-1])
        seed = keys.shared if self.second_round else keys.fixed
        seeds = [seed(i + 1) for i in range(self.rows)]
        sketch = Sketch(size, self._cells(size), seeds)
        table = yield AllReduce(sketch.of(values))
        k = num_sent(size, self.sparsity)
        offset = tie_offset(size, keys)
        if not self.second_round:
            return self._fetch(sketch, table, state, values, k, offset)
        table = tf.where(tf.math.is_finite(table), table, 0)  # ignores overflowed cells
        positions, _ = top_k(sketch.estimates(table), k, offset)
        mine = tf.gather(values, positions)
        total = yield AllReduce(mine)
        return Result(
            SparseEntries(positions, total, size),
            SparseEntries(positions, mine, size),
            entries=k,
        )

    def native(self, shape: tuple[int, ...]) -> NativeMethod | None:
        """Return the native method; None without a second round."""
        size = math.prod(shape)
        if not self.second_round:
            return None
        if self._sends_whole(size):
            return NativeMethod("whole", [math.inf], summed_as=tf.float32)
        k, cells = num_sent(size, self.sparsity), self._cells(size)
        return NativeMethod(
            self.name,
            [*NativeMethod.in_halves(k), *NativeMethod.in_halves(cells), self.rows],
            summed_as=tf.float32,
            num_summed=k,
            first=f"{self.name}, table",
            first_summed=self.rows * cells,
            num_notes=k,
        )

    def error_bound(self, size: int) -> float | None:
        """Return 1 with a second round, which sends exact entries."""
        del size
        return 1.0 if self.second_round else None

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            "sparsity": self.sparsity,
            "rows": self.rows,
            "columns": self.columns,
            "second_round": self.second_round,
            "momentum": self.momentum,
        }

    def _fetch(
        self,
        sketch: Sketch,
        table: tf.Tensor,
        state: dict[str, tf.Tensor],
        values: tf.Tensor,
        k: int,
        offset: tf.Tensor,
    ) -> Result:
        """Accumulate in the sketch, and remove the k largest estimates from it."""
        new_state = {}
        if self.momentum:
            table = self.momentum * state["momentum"] + table
            new_state["momentum"] = table
        new_state["error"] = state["error"] + table
        estimates = sketch.estimates(new_state["error"])
        positions, largest = top_k(estimates, k, offset)
        update = tf.scatter_nd(positions[:, tf.newaxis], largest, values.shape)
        mask = tf.cast(~sketch.touched(update), values.dtype)
        new_state = {name: table * mask for name, table in new_state.items()}
        return Result(update, values, new_state, k)

    def _cells(self, size: int) -> int:
        return slots.num_slots(size, self.columns)

    def _numbers(self, size: int) -> int:
        k = num_sent(size, self.sparsity) if self.second_round else 0
        return self.rows * self._cells(size) + k

    def _sends_whole(self, size: int) -> bool:
        return self._numbers(size) >= size
