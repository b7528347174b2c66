"""Estimates how much the workers' gradients correlate, from a few entries per step.

The second moment of a sum of N gradients is N times that of one gradient if they are
independent noise, and N**2 times if they are equal; early in training and with large
batches they nearly are. In every step the workers add up a few entries of each tensor,
and their squares.
"""

import collections
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.conditions import BoolOrTensor
from tf_dgc.multiworker.worker_variables import PerWorkerVariable, SharedVariable
from tf_dgc.steps import preconditioning
from tf_dgc.steps.accumulation import take_rows
from tf_dgc.steps.base import StepInputs, WorkerState
from tf_dgc.steps.preconditioning import Divisor

_ENTRIES = 8  # sampled per tensor and step
_DECAY = 0.99  # of the moving averages, per step


class CorrelationSample:
    """Samples of the compressed tensors, and their moving averages.

    Attributes:
        num_workers: number of workers, N.
        tensor: the sample of one step, an uncompressed tensor that is sent with the
            others.
        averages: variable `[tensors, 2]`, equal on all workers: moving averages of the
            squared sums over workers, and of the sums of squares.
        received: variable for the sum of a step's samples over the workers.
    """

    def __init__(self, tensors: Sequence[TensorSpec], num_workers: int, seed: int):
        self._sizes = [t.size for t in tensors]
        self.num_workers = num_workers
        self._seed = seed
        rows, dtype = len(tensors), tensors[0].dtype
        self.tensor = TensorSpec(
            "agreement", (rows * (_ENTRIES + 1),), dtype, uncompressed=True
        )
        self.averages = SharedVariable(np.zeros([rows, 2]), dtype.name, "agreement")
        self.received = SharedVariable(
            np.zeros(self.tensor.shape), dtype.name, "agreement_arrived"
        )

    def factors(self) -> tf.Tensor:
        """Return the ratio of the sum's second moment to one worker's, `[tensors]`.

        It is between N and `N**2`, and `N**2` before the first sample.
        """
        sums, squares = tf.unstack(self.averages.local(), axis=1)
        ratio = tf.math.divide_no_nan(sums, squares)
        ratio = tf.where(squares > 0, ratio, float(self.num_workers))
        bounded = tf.clip_by_value(ratio, 1.0, float(self.num_workers))
        return self.num_workers * bounded

    def positions(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return the positions that a step samples, int32 `[tensors, entries]`."""
        return draw_positions(self._sizes, self._seed, iteration)

    def sample(self, values: tf.Tensor, rows: Sequence[int]) -> tf.Tensor:
        """Return this worker's sample: entries of each tensor, and their squared norm.

        Args:
            values: values of some tensors at `positions`, of any scale,
                `[len(rows), entries]`.
            rows: indices of these tensors; the others count as zeros.
        """
        indices = tf.constant(rows, tf.int32, [len(rows)])[:, tf.newaxis]
        entries = tf.scatter_nd(indices, values, [len(self._sizes), _ENTRIES])
        squares = tf.reduce_sum(tf.square(entries), axis=1, keepdims=True)
        return tf.reshape(tf.concat([entries, squares], axis=1), self.tensor.shape)

    def update(self, total: tf.Tensor) -> None:
        """Update the averages by the sum of the workers' samples."""
        rows = tf.reshape(total, [len(self._sizes), _ENTRIES + 1])
        squared_sums = tf.reduce_sum(tf.square(rows[:, :-1]), axis=1)
        new = tf.stack([squared_sums, rows[:, -1]], axis=1)
        self.averages.assign(_DECAY * self.averages.local() + (1 - _DECAY) * new)


def create_correlation_sample(
    tensors: Sequence[TensorSpec], num_workers: int, seed: int
) -> CorrelationSample | None:
    """Return the sample of the compressed tensors; None if there are none.

    A single worker has one too, so that more workers can resume from its checkpoint.
    """
    sampled = [t for t in tensors if not t.uncompressed]
    return CorrelationSample(sampled, num_workers, seed) if sampled else None


def draw_positions(
    sizes: Sequence[int], seed: int, iteration: int | tf.Tensor
) -> tf.Tensor:
    """Draw positions in tensors of these sizes, int32 `[tensors, entries]`."""
    seeds = tf.stack([tf.constant(seed, tf.int64), tf.cast(iteration, tf.int64)])
    shape = [len(sizes), _ENTRIES]
    uniform = tf.random.stateless_uniform(shape, seeds, dtype=tf.float64)
    return tf.cast(uniform * tf.constant(sizes, tf.float64)[:, tf.newaxis], tf.int32)


def add_sample(
    correlation: CorrelationSample,
    inputs: StepInputs,
    worker_state: WorkerState,
    divisors: dict[int, Divisor],
    active: BoolOrTensor,
) -> StepInputs:
    """Add the sample to the step's inputs, as the last tensor.

    `worker_state` is that of all tensors, and `divisors` are those of the sampled ones
    by index. The sample is zero if gradients are not preconditioned in this step.
    """
    row_of = {index: row for row, index in enumerate(divisors)}
    rows = [row_of[i] for i in inputs.indices if i in row_of]
    positions = correlation.positions(inputs.iteration)
    if rows:
        values = _preconditioned_entries(
            inputs, divisors, tf.gather(positions, rows), correlation.tensor.dtype
        )
    else:
        values = tf.zeros([0, positions.shape[1]], correlation.tensor.dtype)
    sample = correlation.sample(values, rows)
    if worker_state.velocity:  # the sample is sent without momentum
        worker_state.velocity[-1].assign(tf.zeros_like(sample))
    indices = [*inputs.indices, len(worker_state.tensors) - 1]
    selected = worker_state.of(indices)
    return inputs._replace(
        tensors=selected.tensors,
        indices=indices,
        gradients=[*inputs.gradients, tf.where(active, sample, tf.zeros_like(sample))],
        scales=[*inputs.scales, 1.0],
        worker_state=selected,
    )


def _preconditioned_entries(
    inputs: StepInputs,
    divisors: dict[int, Divisor],
    positions: tf.Tensor,
    dtype: tf.DType,
) -> tf.Tensor:
    """Return preconditioned gradients at some positions, `[rows, entries]`.

    There is a row for each tensor of the step that has a divisor. All rows are computed
    at once, because the number of such small operations determines their time.
    """
    places = [place for place, i in enumerate(inputs.indices) if i in divisors]
    row_divisors = [divisors[inputs.indices[place]] for place in places]
    tensors = [inputs.tensors[place] for place in places]
    infinity = row_divisors[0].infinity  # the same for all
    entries = [
        tf.cast(take_rows(inputs.gradients[place], tensor, row), dtype)
        for place, tensor, row in zip(
            places, tensors, tf.unstack(positions), strict=True
        )
    ]
    scales = tf.stack([tf.cast(inputs.scales[place], dtype) for place in places])
    gradients = tf.stack(entries) * scales[:, tf.newaxis]
    indices = unravel(positions, [t.shape for t in tensors])
    numbers = tf.stack([d.numbers for d in row_divisors])
    moments = _entries_at([d.moment for d in row_divisors], indices, dtype)
    moments = preconditioning.update_moment(moments, gradients, numbers, infinity)
    if row_divisors[0].largest is not None:
        largest = _entries_at([d.largest for d in row_divisors], indices, dtype)
        moments = tf.maximum(largest, moments)
    return preconditioning.divided_gradient(gradients, moments, numbers, infinity)


def _entries_at(
    variables: Sequence[PerWorkerVariable],
    indices: Sequence[tf.Tensor],
    dtype: tf.DType,
) -> tf.Tensor:
    """Return entries of each variable, `[variables, entries]`."""
    pairs = zip(variables, indices, strict=True)
    return tf.stack([tf.cast(v.local_at(index), dtype) for v, index in pairs])


def unravel(positions: tf.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[tf.Tensor]:
    """Convert flat positions to indices, int32 `[entries, rank]` for each tensor.

    Args:
        positions: positions in each tensor, int32 `[tensors, entries]`.
        shapes: shape of each tensor.
    """
    rows_of_rank = collections.defaultdict(list)
    for row, shape in enumerate(shapes):
        rows_of_rank[len(shape)].append(row)
    indices: dict[int, tf.Tensor] = {}
    for rank, rows in rows_of_rank.items():  # tensors of one rank at once
        dims = [shapes[row] for row in rows]
        strides = [[math.prod(s[axis + 1 :]) for axis in range(rank)] for s in dims]
        flat = tf.gather(positions, rows)[:, :, tf.newaxis]
        indices_of_rank = (
            flat
            // tf.constant(strides, tf.int32)[:, tf.newaxis, :]
            % tf.constant(dims, tf.int32)[:, tf.newaxis, :]
        )
        indices.update(zip(rows, tf.unstack(indices_of_rank), strict=True))
    return [indices[row] for row in range(len(shapes))]
