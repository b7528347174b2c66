"""Random numbers of a method, derived from seed, step, tensor and worker only."""

import copy
import math

import tensorflow as tf


class RandomKeys:
    """Seeds for the random numbers of one tensor in one step.

    Args:
        seed: seed of the optimizer, an int.
        step: iteration, a scalar integer tensor.
        tensor: index of the tensor among all of the optimizer, from 0.
        worker: index of the worker, from 0; an int or a scalar integer tensor.
        ties: result of `tie_break_key`, if it is available.
        max_magnitude: upper bound of the magnitudes to send, a power of two, or
            infinity.
        num_workers: number of workers, N.

    Attributes:
        step: iteration, for schedules.
        worker: index of the worker.
        num_workers: number of workers, N.
        max_magnitude: upper bound of the magnitudes to send; see `TensorSpec`. The
            optimizer enforces it unless the method `limits_magnitudes`.
        sizes: numbers of entries of the tensors that a method of the `entire_model`
            sees at once.
    """

    def __init__(
        self,
        seed: int,
        step: tf.Tensor,
        tensor: int,
        worker: int | tf.Tensor,
        ties: tf.Tensor | None = None,
        max_magnitude: float = math.inf,
        num_workers: int = 1,
    ):
        self.step = step
        self.worker = worker
        self.num_workers = num_workers
        self.max_magnitude = max_magnitude
        self.sizes: list[int] = []
        self._seed = seed
        self._tensor = tensor
        self._ties = ties

    def of_sizes(self, sizes: list[int]) -> "RandomKeys":
        """Return a copy with these `sizes`."""
        keys = copy.copy(self)
        keys.sizes = sizes
        return keys

    def tie(self) -> tf.Tensor:
        """Return a float64 in [0, 1) to break ties by, the same on all workers."""
        ties = self._ties
        if ties is None:
            ties = tie_break_key(self._seed, self.step, self._tensor + 1)
        return ties[self._tensor]

    def shared(self, salt: int = 0) -> tf.Tensor:
        """Return a seed, int32 `[2]`, the same on all workers.

        Args:
            salt: number that selects one of several independent seeds.
        """
        step = tf.cast(self.step, tf.int64)
        seeds = tf.stack([tf.constant(self._seed, tf.int64), step])
        return _fold_in(_fold_in(seeds, self._tensor), salt)

    def fixed(self, salt: int = 0) -> tf.Tensor:
        """Return a seed, int32 `[2]`, the same on all workers in all steps."""
        seeds = tf.constant([self._seed, -1], tf.int64)  # no iteration is -1
        return _fold_in(_fold_in(seeds, self._tensor), salt)

    def local(self, salt: int = 0) -> tf.Tensor:
        """Return a seed, int32 `[2]`, independent on every worker."""
        return _fold_in(self.shared(salt), tf.cast(self.worker, tf.int32) + 1)


def tie_break_key(seed: int, step: tf.Tensor, num_tensors: int) -> tf.Tensor:
    """Return `RandomKeys.tie` of all tensors, float64 `[num_tensors]`.

    Args:
        seed: seed of the optimizer; TensorFlow's global seed is not used.
        step: iteration, a scalar integer tensor.
        num_tensors: number of tensors of the model, with or without a gradient in this
            step.
    """
    return tf.random.stateless_uniform([num_tensors], [seed, step], dtype=tf.float64)


def _fold_in(seed: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    data = tf.cast(number, tf.int32)
    return tf.random.experimental.stateless_fold_in(seed, data)
