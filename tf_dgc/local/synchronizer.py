"""Endings: what workers do about each other when a round of local steps ends."""

import abc
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import clipping
from tf_dgc._internals import keras_optimizers, keras_rules, optimizer_copies
from tf_dgc.collectives.communicator import Communicator
from tf_dgc.collectives.requests import AllGather
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.multiworker.worker_variables import ReplicaCopies, SharedVariable
from tf_dgc.optimizers.state import OptimizerState

# --- What an optimizer that steps alone remembers, and how a worker begins it anew.


class InnerState:
    """Slots of the inner optimizer: momentum, second moments, waiting gradients.

    Iterations and the learning rate are not among them, as schedules go by these; but
    bias corrections go by the age of the slots (`_internals/keras_rules.py`).

    Args:
        optimizer: inner optimizer, built, before its first step. Its slots begin with
            one number each, or as copies of the weights, as those of Keras do.
        variables: variables of the model.
        strategy: strategy under which it was built.

    Raises:
        ValueError: for slots that begin in another way.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
        strategy: tf.distribute.Strategy,
    ):
        self._optimizer, self._strategy = optimizer, strategy
        scalars = optimizer.iterations, optimizer.learning_rate
        apart = {id(v) for v in scalars}
        slots = [
            v
            for v in optimizer.variables
            if id(v) not in apart
            and tf.as_dtype(v.dtype).is_floating
            and optimizer_copies.was_added_by(optimizer, v)
        ]
        self._slots = slots
        self._copies = self._find_copies(variables)
        copied = {id(slot) for slot, _ in self._copies}
        others = [slot for slot in slots if id(slot) not in copied]
        self._first = [(slot, self._number_of(slot)) for slot in others]

    def begin_anew_unless_finite(
        self, moved: Sequence[tf.Tensor], use_native: bool
    ) -> tf.Tensor:
        """Let this replica forget its state if that, or its weights, hold NaN or Inf.

        Call it in replica context, on the replica's own copies; and behind it, when the
        replica has the weights it goes on with, `copy_weights`.

        Args:
            moved: distance of its weights from where they were, of each tensor.
            use_native: whether all workers have the native operations.

        Returns:
            Whether it did, scalar bool.
        """
        kept = [tf.convert_to_tensor(v.value) for v in self._slots]

        def begin_anew() -> tf.Tensor:
            for slot, first in self._first:
                slot.assign(tf.fill(slot.shape, tf.cast(first, slot.dtype)))
            keras_rules.reset_state(self._optimizer)
            return tf.constant(True)

        finite = clipping.all_finite([*moved, *kept], use_native)
        return tf.cond(finite, lambda: tf.constant(False), begin_anew)

    def copy_weights(self, wanted: tf.Tensor) -> None:
        """Let slots that begin as copies of weights be that; in replica context.

        Args:
            wanted: whether to do so, scalar bool, as `begin_anew_unless_finite` said.
        """
        if not self._copies:
            return

        def copy() -> tf.Tensor:
            for slot, variable in self._copies:
                slot.assign(tf.cast(tf.convert_to_tensor(variable.value), slot.dtype))
            return tf.constant(True)

        tf.cond(wanted, copy, lambda: tf.constant(False))

    def _find_copies(
        self, variables: Sequence[keras.Variable]
    ) -> list[tuple[keras.Variable, keras.Variable]]:
        """Return the slots that begin as copies of weights, and whose they are."""
        weights = [self._read(v) for v in variables]

        def are_copies(slots: list[keras.Variable]) -> bool:
            pairs = list(zip(map(self._read, slots), weights, strict=True))
            some = any(not _is_one_number(value) for value, _ in pairs)
            return some and all(np.array_equal(value, w) for value, w in pairs)

        lists = keras_rules.lists_of_slots(self._optimizer, len(variables))
        copied = [slots for slots in lists if are_copies(slots)]
        return [pair for slots in copied for pair in zip(slots, variables, strict=True)]

    def _number_of(self, slot: keras.Variable) -> float:
        values = self._read(slot)
        if not _is_one_number(values):
            raise ValueError(
                "A worker whose inner state is lost begins with a new one, so what the "
                "inner optimizer remembers must begin with one number per variable, or "
                "as copies of the model's variables. Pass another. Received: "
                f"{type(self._optimizer).__name__}, of which {slot.path} begins "
                "with others"
            )
        return float(values.reshape(-1)[0]) if values.size else 0.0

    def _read(self, variable: keras.Variable) -> np.ndarray:
        with tf.init_scope():  # the first call may come while a step is being traced
            return ReplicaCopies(self._strategy, variable.value).local[0].numpy()


def _is_one_number(values: np.ndarray) -> bool:
    return values.size == 0 or bool(np.all(values == values.reshape(-1)[0]))


# --- Drift: how far the workers are from each other as a round ends.

_WIDTH = 1024  # numbers of a sketch: lengths are right to 2 %
DISTANCE_BYTES = 4 * _WIDTH


class ConsensusDistance:
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
        parts = [sketch_distance(m, s) for m, s in zip(moved, seeds, strict=True)]
        words = tf.bitcast(tf.add_n(parts), tf.int32)
        everyone = communicator.answer(AllGather(words))
        self.variable.assign(largest_distance(tf.bitcast(everyone, tf.float32)))


def sketch_distance(values: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
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


class Synchronizer(abc.ABC):
    """Begins rounds, and ends them by an exchange.

    Args:
        optimizer: `LocalOptimizer` whose rounds they are, its inner optimizer built.
        kept: variables that it keeps.
        variables: variables of the model.

    Attributes:
        anchor: variable of each variable of the model, the same on all workers; none
            where there is no such thing.
        drift: measure of how far the workers are apart; None unless it is tracked.
    """

    def __init__(
        self, optimizer: Any, kept: OptimizerState, variables: Sequence[keras.Variable]
    ):
        self._optimizer, self._kept = optimizer, kept
        self._strategy = tf.distribute.get_strategy()
        inner = optimizer.inner_optimizer
        self._inner = InnerState(inner, variables, self._strategy)
        self.anchor: list[SharedVariable] = []
        self.drift = ConsensusDistance() if optimizer.track_drift else None

    @property
    def _variables(self) -> list[keras.Variable]:
        return keras_optimizers.trainable_variables(self._optimizer)

    @abc.abstractmethod
    def begin(self, rounds: RoundCounter) -> None:
        """Do what is due before a step; in replica context."""

    @abc.abstractmethod
    def end(self, rounds: RoundCounter) -> None:
        """Exchange, and count the round; in replica context."""

    @abc.abstractmethod
    def consensus(self, rounds: RoundCounter) -> None:
        """Do the same as `end`, and leave all workers alike."""

    @abc.abstractmethod
    def agreed(self, what: str) -> list[list[tf.Tensor]]:
        """Return what all workers have alike, outside of steps.

        Args:
            what: name of the use, for errors.

        Returns:
            Values of each variable, one per local replica.
        """
