"""Random numbers of a method: by seed, step, tensor and worker, and by nothing else."""

import copy
import math

import tensorflow as tf


class RandomKeys:
    """Randomness of one tensor in one step, from seeds alone.

    Args:
        seed: seed of the optimizer, an int.
        step: iteration, a scalar integer tensor.
        tensor: index of the tensor among all of the optimizer, from 0.
        worker: index of the worker, from 0; an int or a scalar integer tensor.
        ties: result of `draw_ties`, if it has been called; None else.
        largest: bound of what may be sent of an entry, a power of two, or infinity.
        num_workers: number of workers, N.

    Attributes:
        step: iteration, for schedules.
        worker: index of the worker, for who takes turns.
        num_workers: number of workers, N.
        largest: bound of what may be sent of an entry; see `Tensor`. The
            optimizer sees to it, unless the method says `respects_largest`.
        sizes: numbers of entries of the tensors that are seen together.
    """

    def __init__(
        self,
        seed: int,
        step: tf.Tensor,
        tensor: int,
        worker: int | tf.Tensor,
        ties: tf.Tensor | None = None,
        largest: float = math.inf,
        num_workers: int = 1,
    ):
        self.step = step
        self.largest = largest
        self.sizes: list[int] = []
        self._key = (seed, tensor)
        self.worker = worker
        self.num_workers = num_workers
        self._ties = ties

    def of_sizes(self, sizes: list[int]) -> "RandomKeys":
        """Return this one, for several tensors together."""
        keys = copy.copy(self)
        keys.sizes = sizes
        return keys

    def tie(self) -> tf.Tensor:
        """Return a float64 in [0, 1), the same on all workers, to break ties by."""
        seed, tensor = self._key
        ties = self._ties
        if ties is None:
            ties = tie_break_key(seed, self.step, tensor + 1)
        return ties[tensor]

    def shared(self, salt: int = 0) -> tf.Tensor:
        """Return a seed, int32 `[2]`, that is the same on all workers.

        Args:
            salt: number, of which another gives another, independent seed.
        """
        seed, tensor = self._key
        seeds = tf.stack([tf.constant(seed, tf.int64), tf.cast(self.step, tf.int64)])
        return _fold(_fold(seeds, tensor), salt)

    def fixed(self, salt: int = 0) -> tf.Tensor:
        """Return a seed, int32 `[2]`, that is the same on all workers in all steps."""
        seed, tensor = self._key
        seeds = tf.constant([seed, -1], tf.int64)  # no iteration is -1
        return _fold(_fold(seeds, tensor), salt)

    def local(self, salt: int = 0) -> tf.Tensor:
        """Return a seed, int32 `[2]`, that is independent on every worker."""
        return _fold(self.shared(salt), tf.cast(self.worker, tf.int32) + 1)


def tie_break_key(seed: int, step: tf.Tensor, num_tensors: int) -> tf.Tensor:
    """Return `Draw.tie` of all tensors, float64 `[num_tensors]`, by one operation.

    Args:
        seed: seed of the optimizer; TensorFlow's global seed is not touched.
        step: iteration, a scalar integer tensor.
        num_tensors: number of tensors of the model, whether or not they have a gradient
            in this step.
    """
    return tf.random.stateless_uniform([num_tensors], [seed, step], dtype=tf.float64)


def _fold(seed: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    data = tf.cast(number, tf.int32)
    return tf.random.experimental.stateless_fold_in(seed, data)
