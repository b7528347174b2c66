"""Agreement: how much of what the workers have adds up, as a sample tells.

The second moment of a sum of N gradients is N times that of one if they are independent
noise, and N**2 times if they are equal: at first, and with large batches, they nearly
are. In every step the workers add up a few entries of each tensor, and their squares.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_dgc.codecs.tensor import Tensor
from tf_dgc.distribute.worker_variables import SharedVariable

_ENTRIES = 8  # of each tensor and step
_REMEMBERED = 0.99  # of what was seen before, in every step


class Agreement:
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

    def __init__(self, tensors: Sequence[Tensor], num_workers: int, seed: int):
        self._sizes = [t.size for t in tensors]
        self.num_workers = num_workers
        self._seed = seed
        rows, dtype = len(tensors), tensors[0].dtype
        self.tensor = Tensor("agreement", (rows * (_ENTRIES + 1),), dtype, exempt=True)
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
    draws = tf.random.stateless_uniform(shape, seeds, dtype=tf.float64)
    return tf.cast(draws * tf.constant(sizes, tf.float64)[:, tf.newaxis], tf.int32)


def make_agreement(
    tensors: Sequence[Tensor], num_workers: int, seed: int
) -> Agreement | None:
    """Return what is known of the tensors that are not exempt; None if all are.

    Also of one worker, so that another number can go on with what it saved.
    """
    sampled = [t for t in tensors if not t.exempt]
    return Agreement(sampled, num_workers, seed) if sampled else None
