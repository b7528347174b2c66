"""Agreement: how much of what the workers have adds up, as a sample tells.

The second moment of a sum of N gradients is N times that of one if they are independent
noise, and N**2 times if they are equal: at first, and with large batches, they nearly
are. In every step the workers add up a few entries of each tensor, and their squares.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dgc.codecs.tensor_spec import TensorSpec
from tf_dgc.multiworker.worker_variables import SharedVariable
from tf_dgc.smart_cond import BoolOrTensor
from tf_dgc.steps import preconditioning
from tf_dgc.steps.accumulation import take_rows
from tf_dgc.steps.base import StepInputs
from tf_dgc.steps.preconditioning import Divisor
from tf_dgc.steps.state import WorkerState

_ENTRIES = 8  # of each tensor and step
_REMEMBERED = 0.99  # of what was seen before, in every step


class CorrelationSample:
    """What the workers' samples came to, alike on all workers.

    Args:
        tensors: descriptions of the tensors that are sampled.
        num_workers: number of workers, N.
        seed: seed of where samples are taken.

    Attributes:
        num_workers: number of workers, N.
        tensor: description of the sample of a step: a tensor that is exempt, and
            travels with the others.
        seen: variable, `[tensors, 2]`: mean squares of the sums, and sums of the
            squares.
        arrived: variable for the sum of a step's samples, while it is being made.
    """

    def __init__(self, tensors: Sequence[TensorSpec], num_workers: int, seed: int):
        self._sizes = [t.size for t in tensors]
        self.num_workers = num_workers
        self._seed = seed
        rows, dtype = len(tensors), tensors[0].dtype
        self.tensor = TensorSpec(
            "agreement", (rows * (_ENTRIES + 1),), dtype, uncompressed=True
        )
        self.seen = SharedVariable(np.zeros([rows, 2]), dtype.name, "agreement")
        none = np.zeros(self.tensor.shape)
        self.arrived = SharedVariable(none, dtype.name, "agreement_arrived")

    def factors(self) -> tf.Tensor:
        """Return the second moment of the sum by that of one worker's, `[tensors]`.

        Numbers from N to `N**2`, which is what is taken before anything was seen.
        """
        total, squares = tf.unstack(self.seen.local(), axis=1)
        ratio = tf.math.divide_no_nan(total, squares)
        ratio = tf.where(squares > 0, ratio, float(self.num_workers))
        bounded = tf.clip_by_value(ratio, 1.0, float(self.num_workers))
        return self.num_workers * bounded

    def positions(self, iteration: tf.Tensor) -> tf.Tensor:
        """Return where a step's sample is taken, int32 `[tensors, entries]`."""
        return draw_positions(self._sizes, self._seed, iteration)

    def sample(self, values: tf.Tensor, rows: Sequence[int]) -> tf.Tensor:
        """Return what the workers are to add up.

        Args:
            values: values of some tensors at `positions`, of any scale,
                `[rows, entries]`.
            rows: places of these tensors; the others count as zeros.
        """
        at = tf.constant(rows, tf.int32, [len(rows)])[:, tf.newaxis]
        taken = tf.scatter_nd(at, values, [len(self._sizes), _ENTRIES])
        squares = tf.reduce_sum(tf.square(taken), axis=1, keepdims=True)
        return tf.reshape(tf.concat([taken, squares], axis=1), self.tensor.shape)

    def learn(self, total: tf.Tensor) -> None:
        """Remember the sum over workers of their samples."""
        rows = tf.reshape(total, [len(self._sizes), _ENTRIES + 1])
        squares = tf.reduce_sum(tf.square(rows[:, :-1]), axis=1)
        now = tf.stack([squares, rows[:, -1]], axis=1)
        self.seen.assign(_REMEMBERED * self.seen.local() + (1 - _REMEMBERED) * now)


def draw_positions(
    sizes: Sequence[int], seed: int, iteration: int | tf.Tensor
) -> tf.Tensor:
    """Return where the sample of a step is taken, int32 `[tensors, entries]`."""
    seeds = tf.stack([tf.constant(seed, tf.int64), tf.cast(iteration, tf.int64)])
    shape = [len(sizes), _ENTRIES]
    keys_per_tensor = tf.random.stateless_uniform(shape, seeds, dtype=tf.float64)
    return tf.cast(
        keys_per_tensor * tf.constant(sizes, tf.float64)[:, tf.newaxis], tf.int32
    )


def create_correlation_sample(
    tensors: Sequence[TensorSpec], num_workers: int, seed: int
) -> CorrelationSample | None:
    """Return what is known of the tensors that are not exempt; None if all are.

    Also of one worker, so that another number can go on with what it saved.
    """
    sampled = [t for t in tensors if not t.uncompressed]
    return CorrelationSample(sampled, num_workers, seed) if sampled else None


# --- The sample of `Agreement`: a tensor more, of what the others are divided to be.


def add_sample(
    agreement: CorrelationSample,
    inputs: StepInputs,
    worker_state: WorkerState,
    divisors: dict[int, Divisor],
    active: BoolOrTensor,
) -> StepInputs:
    """Return what goes into a step with the sample as its last tensor.

    Args:
        agreement: agreement that the sample is for.
        inputs: inputs of the step, without divisors.
        worker_state: memory of all tensors, the sample's last.
        divisors: divisor of each tensor that is sampled, by its place.
        active: whether they are divided in this step; else the sample is zero.
    """
    places = {i: at for at, i in enumerate(divisors)}
    rows = [places[i] for i in inputs.indices if i in places]
    positions = agreement.positions(inputs.iteration)
    if rows:
        values = _peek(agreement, inputs, divisors, tf.gather(positions, rows))
    else:
        values = tf.zeros([0, positions.shape[1]], agreement.tensor.dtype)
    sample = agreement.sample(values, rows)
    if worker_state.velocity:  # what is sent is the sample itself
        worker_state.velocity[-1].assign(tf.zeros_like(sample))
    indices = [*inputs.indices, len(worker_state.tensors) - 1]
    own = worker_state.of(indices)
    return inputs._replace(
        tensors=own.tensors,
        indices=indices,
        gradients=[*inputs.gradients, tf.where(active, sample, tf.zeros_like(sample))],
        scales=[*inputs.scales, 1.0],
        worker_state=own,
        divisors=[*map(divisors.get, inputs.indices), None],
    )


def _peek(
    agreement: CorrelationSample,
    inputs: StepInputs,
    divisors: dict[int, Divisor],
    positions: tf.Tensor,
) -> tf.Tensor:
    """Return what some entries are going to be divided to be, `[rows, entries]`.

    A row for each tensor of the step that has a divisor, all at once: operations on so
    little take as long as their number.
    """
    dtype = agreement.tensor.dtype
    of_step = zip(
        inputs.indices, inputs.gradients, inputs.scales, inputs.tensors, strict=True
    )
    given = [(divisors[i], g, s, t) for i, g, s, t in of_step if i in divisors]
    infinity = given[0][0].infinity  # they are of one kind
    found = [
        tf.cast(take_rows(g, t, at), dtype)
        for (_, g, _, t), at in zip(given, tf.unstack(positions), strict=True)
    ]
    scales = [tf.cast(scale, dtype) for _, _, scale, _ in given]
    picked = tf.stack(found) * tf.stack(scales)[:, tf.newaxis]
    indices = unravel(positions, [t.shape for *_, t in given])

    def kept(variables: Sequence[Any]) -> tf.Tensor:
        pairs = zip(variables, indices, strict=True)
        return tf.stack([tf.cast(v.local_at(at), dtype) for v, at in pairs])

    numbers = tf.stack([d.numbers for d, *_ in given])
    before = kept([d.moment for d, *_ in given])
    now = preconditioning.update_moment(before, picked, numbers, infinity)
    if given[0][0].largest is not None:
        now = tf.maximum(kept([d.largest for d, *_ in given]), now)
    return preconditioning.divided_gradient(picked, now, numbers, infinity)


def unravel(positions: tf.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[tf.Tensor]:
    """Return indices of flat positions, int32 `[entries, rank]` of each tensor.

    Args:
        positions: positions in each tensor, int32 `[tensors, entries]`.
        shapes: shape of each.
    """
    of_rank = collections.defaultdict(list)
    for row, shape in enumerate(shapes):
        of_rank[len(shape)].append(row)
    found: dict[int, tf.Tensor] = {}
    for rows in of_rank.values():
        given = [shapes[row] for row in rows]
        after = [[math.prod(s[axis + 1 :]) for axis in range(len(s))] for s in given]
        flat = tf.gather(positions, rows)[:, :, tf.newaxis]
        within = tf.constant(given, tf.int32)[:, tf.newaxis, :]
        indices = flat // tf.constant(after, tf.int32)[:, tf.newaxis, :] % within
        found.update(zip(rows, tf.unstack(indices), strict=True))
    return [found[row] for row in range(len(shapes))]
