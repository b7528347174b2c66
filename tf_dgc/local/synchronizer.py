"""What all synchronizers share: the inner state's reset and the consensus distance."""

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from tf_dgc import clipping, metrics
from tf_dgc._internals import keras_rules, optimizer_copies
from tf_dgc.collectives.requests import AllGather
from tf_dgc.local.rounds import RoundCounter
from tf_dgc.multiworker.worker_variables import ReplicaCopies, SharedVariable
from tf_dgc.optimizers.state import OptimizerState

if TYPE_CHECKING:
    from tf_dgc.local.optimizer import LocalOptimizer

_SKETCH_SIZE = 1024  # estimates lengths to within 2 %
DISTANCE_BYTES = 4 * _SKETCH_SIZE  # what a worker sends to measure it


class Synchronizer(abc.ABC):
    """Synchronizes the workers of an optimizer, built, at the end of each round.

    Attributes:
        anchor: one variable per model variable, equal on all workers; empty for
            synchronizers without an anchor.
        consensus_distance: variable of the largest L2 distance of a worker's weights
            from the mean in the last round, equal on all workers; None unless it is
            tracked.
    """

    def __init__(
        self,
        optimizer: "LocalOptimizer",
        state: OptimizerState,
        variables: Sequence[keras.Variable],
    ):
        self._optimizer, self._state, self._variables = optimizer, state, variables
        self._strategy = tf.distribute.get_strategy()
        self._inner_state = InnerState(
            optimizer.inner_optimizer, variables, self._strategy
        )
        self.anchor: list[SharedVariable] = []
        self.consensus_distance: SharedVariable | None = None
        if optimizer.diagnostics.track_consensus_distance:
            self.consensus_distance = SharedVariable(np.zeros(()), "float32", "drift")

    @abc.abstractmethod
    def start_round(self, rounds: RoundCounter) -> None:
        """Prepare a round if one begins; called before each step in replica context."""

    @abc.abstractmethod
    def synchronize(self, rounds: RoundCounter) -> None:
        """Exchange and count the round; in replica context."""

    @abc.abstractmethod
    def reach_consensus(self, rounds: RoundCounter) -> None:
        """Synchronize so that all workers have the same weights; in replica context."""

    @abc.abstractmethod
    def consensus_weights(self, use: str) -> list[list[tf.Tensor]]:
        """Return the weights that all workers agree on, outside of steps.

        Args:
            use: verb that says what they are for, for errors.

        Returns:
            Values of each variable, one per local replica.
        """

    def _count(
        self,
        entries: int | tf.Tensor,
        sent_bytes: int | tf.Tensor,
        variables: Sequence[keras.Variable],
        nonfinite: int | tf.Tensor,
    ) -> None:
        counters = self._state.worker_state.counters
        dense_bytes = metrics.dense_bytes(variables)
        metrics.count_step(counters, entries, sent_bytes, dense_bytes, nonfinite)

    def _measure_distance(
        self, tensors: Sequence[tf.Tensor], round_number: tf.Tensor
    ) -> int:
        """Measure the consensus distance if it is tracked; return the bytes sent.

        Workers exchange sketches of 4 kB: sums of entries with random signs, the same
        on all workers. The expected squared length of a sketch is that of the whole
        (Alon, Matias and Szegedy, STOC 1996).

        Args:
            tensors: parameter deltas of this worker, or its weights.
            round_number: scalar int64.
        """
        if self.consensus_distance is None:
            return 0
        seed = tf.constant(self._optimizer.seed, tf.int64)
        sketches = [
            sketch(t, tf.stack([seed, round_number * len(tensors) + i]))
            for i, t in enumerate(tensors)
        ]
        words = tf.bitcast(tf.add_n(sketches), tf.int32)
        all_words = self._optimizer.communicator.answer(AllGather(words))
        distance = largest_distance(tf.bitcast(all_words, tf.float32))
        self.consensus_distance.assign(distance)
        return DISTANCE_BYTES


def assign_weights(
    variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]
) -> None:
    """Assign this replica's copies of model variables; in replica context."""
    for variable, value in zip(variables, values, strict=True):
        tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)


class InnerState:
    """Slots of the inner optimizer: momentum, second moments, accumulated gradients.

    Iterations and learning rate are not among them, as schedules depend on these; bias
    corrections use the age of the slots (`_internals/keras_rules.py`).

    Args:
        optimizer: inner optimizer, built, before its first step.
        variables: variables of the model.
        strategy: strategy under which it was built.

    Raises:
        ValueError: for slots that start neither with one number each, nor as copies of
            the weights, as all of Keras's slots do.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
        strategy: tf.distribute.Strategy,
    ):
        self._optimizer, self._strategy = optimizer, strategy
        scalars = {id(optimizer.iterations), id(optimizer.learning_rate)}
        self._slots = [
            v
            for v in optimizer.variables
            if id(v) not in scalars
            and tf.as_dtype(v.dtype).is_floating
            and optimizer_copies.was_added_by(optimizer, v)
        ]
        self._weight_copies = self._find_weight_copies(variables)
        copies = {id(slot) for slot, _ in self._weight_copies}
        self._initial_numbers = [
            (slot, self._initial_number(slot))
            for slot in self._slots
            if id(slot) not in copies
        ]

    def reset_if_nonfinite(
        self, tensors: Sequence[tf.Tensor], use_native: bool
    ) -> tf.Tensor:
        """Reset this replica's slots if they, or `tensors`, hold NaN or Inf.

        Call it in replica context; call `copy_weights` afterwards, when the replica has
        the weights with which it continues.

        Args:
            tensors: weights or parameter deltas of this replica.
            use_native: whether all workers have the native operations.

        Returns:
            Whether the slots were reset, scalar bool.
        """
        slots = [tf.convert_to_tensor(v.value) for v in self._slots]

        def reset() -> tf.Tensor:
            for slot, number in self._initial_numbers:
                slot.assign(tf.fill(slot.shape, tf.cast(number, slot.dtype)))
            keras_rules.reset_state(self._optimizer)
            return tf.constant(True)

        finite = clipping.all_finite([*tensors, *slots], use_native)
        return tf.cond(finite, lambda: tf.constant(False), reset)

    def copy_weights(self, was_reset: tf.Tensor) -> None:
        """After a reset, set slots that start as copies of the weights.

        Args:
            was_reset: result of `reset_if_nonfinite`.
        """
        if not self._weight_copies:
            return

        def copy() -> tf.Tensor:
            for slot, variable in self._weight_copies:
                slot.assign(tf.cast(tf.convert_to_tensor(variable.value), slot.dtype))
            return tf.constant(True)

        tf.cond(was_reset, copy, lambda: tf.constant(False))

    def _find_weight_copies(
        self, variables: Sequence[keras.Variable]
    ) -> list[tuple[keras.Variable, keras.Variable]]:
        """Return the slots that start as copies of weights, each with its variable."""
        weights = [self._read(v) for v in variables]

        def are_copies(slots: list[keras.Variable]) -> bool:
            values = [self._read(slot) for slot in slots]
            return not all(map(_is_constant, values)) and all(
                map(np.array_equal, values, weights)
            )

        return [
            pair
            for slots in keras_rules.lists_of_slots(self._optimizer, len(variables))
            if are_copies(slots)
            for pair in zip(slots, variables, strict=True)
        ]

    def _initial_number(self, slot: keras.Variable) -> float:
        values = self._read(slot)
        if not _is_constant(values):
            raise ValueError(
                "A worker that loses its inner state resets it, so each variable of "
                "the inner optimizer must begin with one number per variable, or as a "
                "copy of the model's variable. Pass another optimizer. Received: "
                f"{type(self._optimizer).__name__}, whose {slot.path} begins with "
                "other values"
            )
        return float(values.reshape(-1)[0]) if values.size else 0.0

    def _read(self, variable: keras.Variable) -> np.ndarray:
        with tf.init_scope():  # the first call may come while a step is being traced
            return ReplicaCopies(self._strategy, variable.value).local[0].numpy()


def _is_constant(values: np.ndarray) -> bool:
    return values.size == 0 or bool(np.all(values == values.reshape(-1)[0]))


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
    rows = tf.reshape(tf.pad(signed, [[0, -size % _SKETCH_SIZE]]), [-1, _SKETCH_SIZE])
    return tf.reduce_sum(rows, axis=0)


def largest_distance(points: tf.Tensor) -> tf.Tensor:
    """Return the largest distance of a finite point from the mean of these.

    Args:
        points: one point per worker, float32 `[num_workers, n]`.
    """
    finite = tf.reduce_all(tf.math.is_finite(points), axis=1, keepdims=True)
    finite_points = tf.where(finite, points, tf.zeros_like(points))
    count = tf.reduce_sum(tf.cast(finite, points.dtype))
    mean = tf.reduce_sum(finite_points, axis=0) / tf.maximum(count, 1.0)
    distances = tf.norm(tf.where(finite, finite_points - mean, 0.0), axis=1)
    return tf.reduce_max(distances)
