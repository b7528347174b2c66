"""Drift: how far the workers are from each other as a round ends."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_dgc.collectives.requests import Gather
from tf_dgc.distribute.communicator import Communicator
from tf_dgc.distribute.worker_variables import SharedVariable

_WIDTH = 1024  # numbers of a sketch: lengths are right to 2 %
NUM_BYTES = 4 * _WIDTH


class Drift:
    """Measures the largest distance of a worker's weights from the mean of all.

    Workers exchange sketches of what they moved, 4 kB of whatever model: sums of its
    entries with random signs, the same on all, of which the expected squared length is
    that of the whole (Alon, Matias and Szegedy, STOC 1996).

    Attributes:
        variable: variable of the distance in the last round, equal on all workers.
    """

    def __init__(self) -> None:
        self.variable = SharedVariable(np.zeros(()), "float32", "drift")

    def measure(
        self,
        moved: Sequence[tf.Tensor],
        communicator: Communicator,
        seed: int,
        number: tf.Tensor,
    ) -> None:
        """Measure it anew, by one collective of all; in replica context.

        Args:
            moved: distance of this worker from where all began, of each tensor.
            communicator: communicator of all workers.
            seed: seed of the signs.
            number: number of the round, scalar int64.
        """
        seeds = [
            tf.stack([tf.constant(seed, tf.int64), number * len(moved) + i])
            for i in range(len(moved))
        ]
        parts = [sketch(m, s) for m, s in zip(moved, seeds, strict=True)]
        words = tf.bitcast(tf.add_n(parts), tf.int32)
        everyone = communicator.answer(Gather(words))
        self.variable.assign(largest_distance(tf.bitcast(everyone, tf.float32)))


def sketch(values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Return sums of entries with random signs, float32 `[1024]`.

    Args:
        values: tensor of any shape.
        seed: seed of the signs, integer `[2]`.
    """
    flat = tf.cast(tf.reshape(values, [-1]), tf.float32)
    size = flat.shape[0]
    bits = tf.random.stateless_uniform(
        [-(-size // 32)], seed, minval=None, maxval=None, dtype=tf.int32
    )
    shifted = tf.bitwise.right_shift(bits[:, tf.newaxis], tf.range(32))
    odd = tf.bitwise.bitwise_and(tf.reshape(shifted, [-1])[:size], 1)
    signed = tf.where(tf.equal(odd, 1), flat, -flat)
    rows = tf.reshape(tf.pad(signed, [[0, -size % _WIDTH]]), [-1, _WIDTH])
    return tf.reduce_sum(rows, axis=0)


def largest_distance(points: tf.Tensor) -> tf.Tensor:
    """Return the largest distance from the mean, of points that are finite.

    Args:
        points: point of each worker, float32 `[num_workers, n]`.
    """
    finite = tf.reduce_all(tf.math.is_finite(points), axis=1, keepdims=True)
    known = tf.where(finite, points, tf.zeros_like(points))
    number = tf.reduce_sum(tf.cast(finite, points.dtype))
    mean = tf.reduce_sum(known, axis=0) / tf.maximum(number, 1.0)
    distances = tf.norm(tf.where(finite, known - mean, 0.0), axis=1)
    return tf.reduce_max(distances)
